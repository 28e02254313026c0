"""How long a report takes: 60 runs x 500 rounds x 100 clients must take less than 20 s and 6 MB.

    python bench/scripts/report.py [--runs 60] [--rounds 500] [--clients 100]

The experiment is synthetic (the generator of the tests), with a journal for every run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMIT_SECONDS = 20.0
LIMIT_BYTES = 6_000_000
SELECTORS = ("uniform", "fedcbs", "fedcm-ts", "fedcm-ucb", "fedacs", "power-of-choice")
SETTINGS = ({"name": "two classes"}, {"name": "larger cohorts"})


def generator():
    path = Path(__file__).parents[2] / "tests" / "report" / "fixtures.py"
    spec = importlib.util.spec_from_file_location("report_fixtures", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["report_fixtures"] = module
    spec.loader.exec_module(module)
    return module


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--clients", type=int, default=100)
    options = parser.parse_args()
    toy = generator()
    with tempfile.TemporaryDirectory() as scratch:
        seeds = max(1, options.runs // (len(SELECTORS) * len(SETTINGS)))
        path = Path(scratch) / "experiment"
        toy.make_experiment(
            path, [toy.Choice(name) for name in SELECTORS], seeds=seeds, rounds=options.rounds, clients=options.clients,
            size=10, settings=SETTINGS,
        )  # fmt: skip
        runs = seeds * len(SELECTORS) * len(SETTINGS)
        page = Path(scratch) / "report.html"
        code = (
            "import sys; from pathlib import Path; from fedcohort.report.page import assemble, build_report; "
            "Path(sys.argv[2]).write_text(build_report(assemble([sys.argv[1]])))"
        )
        seconds = []
        for _ in range(3):  # a fresh process each time, because imports count
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", code, str(path), str(page)], check=True)
            seconds.append(time.perf_counter() - start)
        size = page.stat().st_size
    result = {
        "runs": runs,
        "rounds": options.rounds,
        "clients": options.clients,
        "seconds": min(seconds),
        "bytes": size,
    }
    print(json.dumps(result))
    within = min(seconds) < LIMIT_SECONDS and size < LIMIT_BYTES
    print(f"{'within' if within else 'ABOVE'} {LIMIT_SECONDS:g} s and {LIMIT_BYTES / 1e6:g} MB", file=sys.stderr)
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
