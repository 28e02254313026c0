"""The baselines of the papers' tables, and selectors from other papers."""
