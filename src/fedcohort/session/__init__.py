"""A session chooses cohorts for one federation, learns from reports, keeps rules, and records all of it."""

from fedcohort.session.session import Session

__all__ = ["Session"]
