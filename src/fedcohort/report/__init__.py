"""See what happened: reports as one self-contained HTML file, explanations, a live dashboard, trackers.

Nothing here trains or imports torch; everything is read from result directories and journals.
"""

from fedcohort.report.data import Bundle, Group, RunCurve, Setting, load_bundle
from fedcohort.report.page import build_report

__all__ = [
    "Bundle",
    "Group",
    "RunCurve",
    "Setting",
    "build_report",
    "load_bundle",
]
