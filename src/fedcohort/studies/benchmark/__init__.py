"""The benchmark: every selector on every kind of federation the five papers use, and ours, scored against uniform.

``suite.py`` says what is run, ``scores.py`` what is made of it, ``page.py`` shows it. A submission is two files: the
``config.toml`` of the experiment and ``bench.json``, its scores; ``submission.py`` checks it.
"""

from fedcohort.studies.benchmark.scores import Scores, score
from fedcohort.studies.benchmark.submission import SubmissionError, check_submission
from fedcohort.studies.benchmark.suite import REPORT_SEEDS, TUNING_SEEDS, VERSION, BenchmarkSetting, suite, table

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
