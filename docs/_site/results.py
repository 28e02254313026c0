"""Results as pages: an HTML file for each stored file of scores and each table of a paper, and a list of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

from _site.picture import stored_scores
from fedcohort_bench.benchmark import timed_page
from fedcohort_bench.benchmark.page import page
from fedcohort_bench.benchmark.run import read_scores, read_time_scores
from fedcohort_bench.papers.catalogue import EXHIBITS
from fedcohort_bench.papers.page import html_page, overview
from fedcohort_bench.papers.record import StudyRecord

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "bench" / "results"
TIME = BENCHMARKS / "benchmark_time.json"
RECORDS = ROOT / "bench" / "src" / "fedcohort_bench" / "papers" / "records"


def write_pages(folder: Path) -> None:
    """Write all HTML pages to a folder."""
    folder.mkdir(parents=True)
    for path in stored_scores(BENCHMARKS):
        html = page(read_scores(path), origin=f"fedcohort {_stored(path, 'fedcohort')}")
        (folder / f"{path.stem.replace('_', '-')}.html").write_text(html, encoding="utf-8")
    html = timed_page.page(read_time_scores(TIME), origin=f"fedcohort {_stored(TIME, 'fedcohort')}")
    (folder / "benchmark-time.html").write_text(html, encoding="utf-8")
    for exhibit in EXHIBITS.values():
        record = StudyRecord.read(RECORDS / f"{exhibit.study.name}.json", exhibit.study)
        (folder / f"{exhibit.name}.html").write_text(html_page(exhibit, record), encoding="utf-8")


def index() -> str:
    """Return the page that lists them."""
    lines = [
        "# All results",
        "",
        "Generated when this site was built, from `bench/results` and `bench/src/fedcohort_bench/papers/records`.",
        "",
        "## The benchmark",
        "",
        "| data | selectors | settings | rounds | seeds | suite | measured with |",
        "|---|--:|--:|--:|---|---|---|",
    ]
    for path in stored_scores(BENCHMARKS):
        scores = read_scores(path)
        seeds = ", ".join(map(str, scores.seeds))
        lines.append(
            f"| {_link(path.stem.replace('_', '-'), scores.data)} | {len(scores.lines) + 1} | {len(scores.settings)} | "
            f"{scores.rounds} | {seeds} | version {_stored(path, 'benchmark')} | "
            f"fedcohort {_stored(path, 'fedcohort')} |"
        )
    timed = read_time_scores(TIME)
    lines += [
        "",
        f"In simulated time, {timed.data}, {len(timed.labels)} selectors in rounds and asynchronously, seeds "
        f"{', '.join(map(str, timed.seeds))}: {_link('benchmark-time', 'simulated hours to the target')}.",
    ]
    table = re.sub(r"^\| `([\w-]+)` \|", lambda m: f"| {_link(m[1], m[1])} |", overview(RECORDS), flags=re.M)
    lines += ["", "## The papers' tables and figures", "", table]
    return "\n".join(lines)


def _stored(path: Path, key: str) -> str:
    """Return a field of stored scores."""
    return str(json.loads(path.read_text(encoding="utf-8"))[key])


def _link(name: str, text: str) -> str:
    return f'<a href="../results/{name}.html">{text}</a>'
