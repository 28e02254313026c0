"""Choose the selectors and seeds of a benchmark, and write its scores; shared by both ways to start one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from fedcohort.core.errors import InputError
from fedcohort.core.files import read_file
from fedcohort.core.protocol import SELECTORS, Selector
from fedcohort.simulate.store.results import load
from fedcohort.simulate.store.writer import write_atomically
from fedcohort.studies.benchmark.page import page
from fedcohort.studies.benchmark.scores import Scores, score
from fedcohort.studies.benchmark.suite import REPORT_SEEDS, TUNING_SEEDS

QUICK_ROUNDS = 20


def every_selector() -> list[str]:
    """Return the names of all selectors that choose: not one that always takes everybody, nor a wrapper."""
    found = {name: cast(type[Selector[Any]], SELECTORS.get(name)) for name in SELECTORS.names()}
    return [name for name, cls in found.items() if cls.selects and not cls.is_wrapper]


def parse_seeds(text: str) -> list[int]:
    """Return the seeds that a word or a list stands for.

    >>> parse_seeds("report"), parse_seeds("1,2")
    ([100, 101, 102, 103, 104], [1, 2])
    """
    if text in ("report", "tuning"):
        return list(REPORT_SEEDS if text == "report" else TUNING_SEEDS)
    try:
        return [int(item) for item in text.split(",")]
    except ValueError:
        raise InputError(f"Seeds must be 'report', 'tuning', or a list such as 1,2. Got {text!r}.") from None


def write_scores(*folders: Path) -> Scores:
    """Score a benchmark, or pieces of one with different settings; write bench.json and bench.html into the first."""
    scores = score(*(load(folder) for folder in folders))
    write_atomically(folders[0] / "bench.json", (json.dumps(scores.to_dict(), indent=1) + "\n").encode())
    write_atomically(folders[0] / "bench.html", page(scores).encode())
    return scores


def read_scores(path: Path) -> Scores:
    """Return the scores of a bench.json."""
    try:
        return Scores.from_dict(json.loads(read_file(path)))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"{path} does not hold scores of the benchmark ({type(error).__name__}: {error}).",
            hint="name a bench.json, as 'fedcohort bench' writes it beside the results",
        ) from error
