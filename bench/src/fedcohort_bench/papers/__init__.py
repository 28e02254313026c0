"""Run the papers' tables and figures, and show the results next to the published ones.

``declare.py`` has the types with which one module per paper declares its tables and the published figures. ``run.py``
runs them in pieces, ``record.py`` keeps the results, ``verdicts.py`` compares them, ``page.py`` shows them. Without the
packages for the terminal: ``python -m fedcohort_bench.papers fedcor-table-1-fmnist``.
"""

from fedcohort_bench.papers.catalogue import EXHIBITS, STUDIES, find
from fedcohort_bench.papers.declare import Beats, Exhibit, Grid, Measure, Near, Study
from fedcohort_bench.papers.record import StudyRecord
from fedcohort_bench.papers.run import Reproduction, reproduce
from fedcohort_bench.papers.verdicts import ClaimVerdict, MarginComparison, judge, ratios

__all__ = [
    "EXHIBITS",
    "STUDIES",
    "Beats",
    "ClaimVerdict",
    "Exhibit",
    "Grid",
    "MarginComparison",
    "Measure",
    "Near",
    "Reproduction",
    "Study",
    "StudyRecord",
    "find",
    "judge",
    "ratios",
    "reproduce",
]
