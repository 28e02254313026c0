"""A session chooses cohorts for one federation, applies rules, learns from reports, and records everything."""

from fedcohort.session.session import Session

__all__ = ["Session"]
