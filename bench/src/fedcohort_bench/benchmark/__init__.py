"""The benchmark: every selector in every kind of federation that the five papers use, and in ours, against uniform.

``suite.py`` defines the runs, ``scores.py`` scores them, ``page.py`` shows the scores. A submission is two files, the
experiment's ``config.toml`` and its scores, ``bench.json``; ``submission.py`` checks them.
"""

from fedcohort_bench.benchmark.scores import Scores, score
from fedcohort_bench.benchmark.submission import SubmissionError, check_submission
from fedcohort_bench.benchmark.suite import REPORT_SEEDS, TUNING_SEEDS, VERSION, BenchmarkSetting, suite, table

__all__ = [
    "REPORT_SEEDS",
    "TUNING_SEEDS",
    "VERSION",
    "BenchmarkSetting",
    "Scores",
    "SubmissionError",
    "check_submission",
    "score",
    "suite",
    "table",
]
