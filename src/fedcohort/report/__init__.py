"""See what happened: reports as one self-contained HTML file, explanations, a live dashboard, trackers.

Nothing here trains or imports torch; everything is read from result directories and journals.
"""

from fedcohort.report.data import Bundle, RunCurve, SelectorRuns, Setting, load_bundle
from fedcohort.report.figure import Figure
from fedcohort.report.page import Report, assemble, build_report, load_figures

__all__ = [
    "Bundle",
    "Figure",
    "Report",
    "RunCurve",
    "SelectorRuns",
    "Setting",
    "assemble",
    "build_report",
    "load_bundle",
    "load_figures",
]
