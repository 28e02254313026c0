"""The papers' tables and figures: run, and shown beside what was published.

``declare.py`` has the words, one module per paper declares its tables with the published figures, ``run.py`` makes the
runs in pieces, ``record.py`` keeps what came out, ``verdicts.py`` compares, ``page.py`` shows. Without the
command line: ``python -m fedcohort.reproduce fedcor-table-1-fmnist``.
"""

from fedcohort.reproduce.catalogue import EXHIBITS, STUDIES, find
from fedcohort.reproduce.declare import Beats, Exhibit, Grid, Measure, Near, Study
from fedcohort.reproduce.record import Record
from fedcohort.reproduce.run import Outcome, reproduce
from fedcohort.reproduce.verdicts import Ratio, Verdict, judge, ratios

__all__ = [
    "EXHIBITS",
    "STUDIES",
    "Beats",
    "Exhibit",
    "Grid",
    "Measure",
    "Near",
    "Outcome",
    "Ratio",
    "Record",
    "Study",
    "Verdict",
    "find",
    "judge",
    "ratios",
    "reproduce",
]
