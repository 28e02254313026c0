"""The durable record of a session: every request, cohort and report, in one SQLite file.

:class:`Journal` is what a session writes; :func:`read_journal` opens the same file for reading while it is being
written. Resume, explanations, shadow selectors, reports and the dashboard all read it.
"""

from fedcohort.journal.opening import is_blank
from fedcohort.journal.replies import ReplyBlock, ReplyRow
from fedcohort.journal.savepoint import Savepoint, rewind
from fedcohort.journal.schema import SCHEMA_VERSION
from fedcohort.journal.store import CohortRow, Journal, read_journal

__all__ = [
    "SCHEMA_VERSION",
    "CohortRow",
    "Journal",
    "ReplyBlock",
    "ReplyRow",
    "Savepoint",
    "is_blank",
    "read_journal",
    "rewind",
]
