"""Waiting for real processes: as long as they have something to say."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from . import loopback
from .loopback import Loopback, LoopbackError


class Time:
    """Ten seconds pass with every look; until ``talks`` seconds the process says something in between."""

    def __init__(self, log: Path, talks: float) -> None:
        self.log, self.talks, self.now = log, talks, 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += 10
        if self.now <= self.talks:
            with self.log.open("a") as file:
                file.write("still at it\n")


@pytest.mark.parametrize("talks", [0.0, 5000.0])
def test_only_silence_ends_the_wait(talks: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run: Any = loopback.Service([sys.executable, "-c", "input()"], {}, tmp_path, tmp_path / "run.log")
    run.process.kill()
    run.process.wait()
    monkeypatch.setattr(type(run), "alive", True)  # a process whose time is ours
    clock = Time(run.log_file, talks)
    monkeypatch.setattr(loopback, "time", clock)
    federation = Loopback(tmp_path / "home", nodes=0)
    with pytest.raises(LoopbackError, match=r"300 s"):
        federation.watch(run, lambda: False, 300)
    assert talks + 300 < clock.now <= talks + 330
    federation.watch(run, lambda: True, 300)


def test_a_run_that_ends_is_not_waited_for(tmp_path: Path) -> None:
    run = loopback.Service([sys.executable, "-c", "print('no'); raise SystemExit(3)"], {}, tmp_path, tmp_path / "log")
    federation = Loopback(tmp_path / "home", nodes=0)
    with pytest.raises(LoopbackError, match=r"The run ended with 3 before that.\n*no"):
        federation.watch(run, lambda: False, 300)
    assert federation.wait(run, 300).status == 3
