"""The papers' tables and figures: run, and shown beside what was published.

``declare.py`` has the words, one module per paper declares its tables with the published figures, ``run.py`` makes the
runs in pieces, ``record.py`` keeps what came out, ``verdicts.py`` compares, ``page.py`` shows. Without the
command line: ``python -m fedcohort.studies.papers fedcor-table-1-fmnist``.
"""

from fedcohort.studies.papers.catalogue import EXHIBITS, STUDIES, find
from fedcohort.studies.papers.declare import Beats, Exhibit, Grid, Measure, Near, Study
from fedcohort.studies.papers.record import StudyRecord
from fedcohort.studies.papers.run import Reproduction, reproduce
from fedcohort.studies.papers.verdicts import ClaimVerdict, MarginComparison, judge, ratios

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
