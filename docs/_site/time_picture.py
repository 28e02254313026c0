"""The picture of the suite "time", from the stored scores.

Run ``PYTHONPATH=docs python -m _site.time_picture`` after the scores have changed; a test compares the file with
them.
"""

from __future__ import annotations

from pathlib import Path

from fedcohort_bench.benchmark.run import read_time_scores
from fedcohort_bench.benchmark.timed_page import draw

ROOT = Path(__file__).parents[2]
SCORES = ROOT / "bench" / "results" / "benchmark_time.json"
PICTURE = ROOT / "docs" / "img" / "time.svg"

if __name__ == "__main__":
    PICTURE.write_text(draw(read_time_scores(SCORES)), encoding="utf-8")
