"""Run the papers' tables and figures, and show the results next to the published ones.

``records/`` has a TOML file per paper, with what it published and claims and what we run, beside our records of these
runs. ``catalogue.py`` reads it into the types of ``declare.py``. ``run.py`` runs the tables in pieces, ``record.py``
keeps the results, ``verdicts.py`` compares them, ``page.py`` shows them.
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
