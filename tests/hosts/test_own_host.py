"""The example of a host over plain HTTP."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_example_over_http_runs_and_ends_by_itself() -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    source = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "own_host.py"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": source},
        check=True,
    )
    rounds = re.findall(r"round (\d): (\w+), (\w+); the model is (\S+)", done.stdout)
    assert [int(found[0]) for found in rounds] == [0, 1, 2, 3, 4], done.stdout
    model = 0.0
    targets = {"anna": 1.0, "ben": 2.0, "cem": 3.0}
    for _, *names, said in rounds:
        losses = {name: (model - target) ** 2 for name, target in targets.items()}
        assert sorted(losses[name] for name in names) == sorted(losses.values())[1:]
        model = sum((model + targets[name]) / 2 for name in names) / 2
        assert float(said) == pytest.approx(model, abs=0.006)
