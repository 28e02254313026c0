"""Signals that a user's file declares, in the simulator."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fedcohort as fc
from fedcohort.core.errors import SignalError
from fedcohort.journal import read_journal

FILE = Path(__file__).parents[1] / "hosts" / "own_signals.py"
SMALL = {"rounds": 2, "clients": 6, "cohort": 2, "seeds": 1, "model": "logistic", "quiet": True}


def test_signals_beside_a_selector_are_computed_in_a_comparison(tmp_path: Path) -> None:
    results = fc.compare({"uniform": {}, "curious": {"name": f"{FILE}:Curious"}}, out=tmp_path / "runs", **SMALL)
    paths = {run.id.split("-")[0]: results.journal(run) for run in results.runs}
    journal = read_journal(paths["curious"])
    try:
        replies = journal.replies()
        assert len(replies) == 4
        for reply in replies:
            assert {"large-loss", "large-loss-after", "step", "slope"} <= reply.metrics.keys()
            assert all(np.isfinite(value) and value > 0 for value in reply.metrics.values())
    finally:
        journal.close()
    # The other run does not use these signals, so its journal opens in a process that never heard of them.
    code = f"import fedcohort as fc; print(fc.Session.open({str(paths['uniform'])!r}).round)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "2"


def test_own_signals_have_the_values_of_the_same_library_signals(tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text(
        "from dataclasses import dataclass\n"
        "import fedcohort as fc\n"
        "from fedcohort.selectors import Uniform\n"
        "RMS = fc.Signal('my-rms', meaning='a loss', how=fc.LossOf(fc.LossMeasure(mean='root-mean-square')))\n"
        "STEP = fc.Signal('my-step', meaning='a length', how=fc.VectorOf('update', 'norm'))\n"
        "FAR = fc.Signal('my-distance', meaning='a distance', how=fc.VectorOf('gradient', 'distance'))\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Twice(Uniform):\n"
        "    @property\n"
        "    def requires(self):\n"
        "        S = fc.Signal\n"
        "        return frozenset({RMS, S.LOSS_RMS, STEP, S.UPDATE_NORM, FAR, S.GRADIENT_DISTANCE})\n"
    )
    results = fc.compare([f"{tmp_path}/twice.py:Twice"], out=tmp_path / "runs", **SMALL)
    journal = read_journal(results.journal(results.runs[0]))
    try:
        for reply in journal.replies():
            values = reply.metrics
            assert values["my-rms"] == values["loss-rms"]
            assert values["my-step"] == values["update-norm"]
            assert values["my-distance"] == values["gradient-distance"]
    finally:
        journal.close()


def test_a_method_on_the_servers_samples_is_one_file(tmp_path: Path) -> None:
    """Its signals say how the simulator computes them: here two Shapley values by the definition, and a loss."""
    (tmp_path / "fair.py").write_text(
        "from dataclasses import dataclass\n"
        "import numpy as np\n"
        "import fedcohort as fc\n"
        "from fedcohort.selectors import GreedyFed\n"
        "def by_definition(utility, members, rng):\n"
        "    nobody, first, second, both = utility(np.array([[0, 0], [1, 0], [0, 1], [1, 1]], bool))\n"
        "    return np.array([first - nobody + both - second, second - nobody + both - first]) / 2\n"
        "VALUE = fc.Signal('my-value', meaning='a Shapley value', how=fc.OnServer(by_definition))\n"
        "LOSS = fc.Signal('my-loss', meaning='a loss', how=fc.OnServer())\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Fair(GreedyFed):\n"
        "    @property\n"
        "    def requires(self):\n"
        "        return super().requires | {VALUE, LOSS}\n"
    )
    fair = f"{tmp_path}/fair.py:Fair"
    results = fc.compare([fair], overrides={"scenario.server_validation": 5}, out=tmp_path / "runs", **SMALL)
    journal = read_journal(results.journal(results.runs[0]))
    try:
        for round_ in range(2):
            replies = [reply.metrics for reply in journal.replies(round_)]
            assert len(replies) == 2 and len({values["my-loss"] for values in replies}) == 1
            for values in replies:
                assert values["my-loss"] > 0
                assert values["my-value"] == pytest.approx(values["shapley-value"], abs=1e-9)
    finally:
        journal.close()
    with pytest.raises(SignalError, match="'my-"):  # the server has no samples
        fc.compare([fair], overrides={"scenario.server_validation": 0}, out=tmp_path / "without", **SMALL)


@pytest.mark.parametrize("values", ["[1.0] * (members + 1)", "1 / 0", "'many'"])
def test_a_function_that_goes_wrong_ends_only_its_own_run(tmp_path: Path, values: str) -> None:
    (tmp_path / "odd.py").write_text(
        "from dataclasses import dataclass\n"
        "import fedcohort as fc\n"
        "from fedcohort.selectors import Uniform\n"
        f"ODD = fc.Signal('odd-{len(values)}', meaning='x', how=fc.OnServer(lambda utility, members, rng: {values}))\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Odd(Uniform):\n"
        "    @property\n"
        "    def requires(self):\n"
        "        return frozenset({ODD})\n"
    )
    overrides = {"scenario.server_validation": 5}
    results = fc.compare(["uniform", f"{tmp_path}/odd.py:Odd"], overrides=overrides, out=tmp_path / "runs", **SMALL)
    states = {run.label: run.state for run in results.runs}
    assert states["uniform"] == "finished" and states["Odd"] == "failed"


def test_a_signal_that_only_a_client_can_report_is_refused_before_the_first_round(tmp_path: Path) -> None:
    with pytest.raises(SignalError, match=r"'battery-used' \(percent of the battery.*simulator") as caught:
        fc.compare([f"{FILE}:Gentle"], out=tmp_path / "runs", **SMALL)
    assert "how=" in str(caught.value)
