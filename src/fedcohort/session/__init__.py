"""A session: who is asked, what came back, under which rules, all of it on record."""

from fedcohort.session.session import Session

__all__ = ["Session"]
