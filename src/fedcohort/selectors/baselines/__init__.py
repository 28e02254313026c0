"""Every baseline of the papers' tables, and selectors of other papers."""
