"""Test vectors: selectors against formulas of the papers, and the check of strangers against right and wrong ones."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedcohort.cli.app import app
from fedcohort_bench.cli.vectors import vectors
from fedcohort_bench.vectors import DATA, check_as, formulas, load_stranger, verify
from fedcohort_bench.vectors.files import difference, expected_of, names
from fedcohort_bench.vectors.formulas import FORMULAS

HERE = Path(__file__).parent
QUICK = ["uniform", "oort", "power-of-choice", "fedcm-ucb", "balanced", "greedyfed"]


def vector(name: str) -> dict[str, Any]:
    return json.loads((DATA / f"{name}.json").read_text())


def test_every_selector_has_a_vector() -> None:
    assert {path.stem for path in DATA.glob("*.json")} == set(names())


@pytest.mark.parametrize("name", QUICK)
def test_the_selectors_do_what_the_vectors_say(name: str) -> None:
    assert dict(verify(DATA, [name])) == {name: ""}


@pytest.mark.slow
def test_all_selectors_do_what_the_vectors_say() -> None:
    assert {name: problem for name, problem in verify(DATA, names()) if problem} == {}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n == "balanced" else []) for n in sorted(FORMULAS)]
)
def test_the_vectors_are_what_the_formula_computes_from_their_inputs(name: str) -> None:
    v = vector(name)
    inputs = {**v, "rounds": [{k: x for k, x in entry.items() if k != "expected"} for entry in v["rounds"]]}
    assert difference(v, json.loads(json.dumps(expected_of(inputs)))) == ""


def test_formulas_share_no_code_with_the_selectors() -> None:
    for path in Path(formulas.__file__).parent.glob("*.py"):
        imported = re.findall(r"^ *(?:from|import) (fedcohort\S*)", path.read_text(), re.MULTILINE)
        assert all(module.startswith("fedcohort_bench.vectors.formulas") for module in imported), path


def test_a_changed_vector_is_noticed(tmp_path: Path) -> None:
    changed = vector("oort")
    expected = changed["rounds"][3]["expected"]
    expected["scores"]["5"] += 0.01
    (tmp_path / "oort.json").write_text(json.dumps(changed))
    ((name, problem),) = verify(tmp_path, ["oort"])
    assert name == "oort" and problem.startswith("rounds[3].scores.5 is ")
    expected["scores"]["5"] -= 0.01
    client, chance = next((c, p) for c, p in expected["probabilities"].items() if 0.3 < p < 0.7)
    expected["probabilities"][client] = chance - 0.2
    (tmp_path / "oort.json").write_text(json.dumps(changed))
    assert dict(verify(tmp_path, ["oort"]))["oort"].startswith(f"rounds[3]: it picks client {client} in ")
    assert difference({"a": [1, 2]}, {"a": [1, 3]}) == "a[1] is 2, expected 3"


# -- strangers --------------------------------------------------------------------------------------------------------


class Uniform:
    """Right."""

    def __init__(self, clients: int, sizes: list[int], seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.told: list[Any] = []

    def ask(self, round_: int, available: list[int], size: int, losses: Any) -> list[int]:
        return list(self.rng.choice(available, size, replace=False))

    def tell(self, round_: int, results: list[dict[str, Any]]) -> None:
        self.told += results


class PowerOfChoice(Uniform):
    """Right: d = 8 clients drawn by size, and the largest losses of them."""

    def __init__(self, clients: int, sizes: list[int], seed: int) -> None:
        super().__init__(clients, sizes, seed)
        self.sizes = np.array(sizes)

    def ask(self, round_: int, available: list[int], size: int, losses: Any) -> list[int]:
        p = self.sizes[available] / self.sizes[available].sum()
        asked = self.rng.choice(available, min(2 * size, len(available)), replace=False, p=p)
        order = np.argsort(losses(asked.tolist()))[::-1]
        return self.picked(asked, order, size)

    def picked(self, asked: Any, order: Any, size: int) -> list[int]:
        return list(asked[order[:size]])


class WrongIndices(PowerOfChoice):
    """Takes positions among the clients asked for the clients themselves."""

    def picked(self, asked: Any, order: Any, size: int) -> list[int]:
        return list(order[:size])


class LastLossOverDuration(Uniform):
    """What some libraries call Oort; it always takes the same clients once it has seen all."""

    def ask(self, round_: int, available: list[int], size: int, losses: Any) -> list[int]:
        worth = {row["client"]: row["loss"] / row["duration"] for row in self.told}
        return sorted(available, key=lambda c: (-worth.get(c, math.inf), c))[:size]


class Peeks(Uniform):
    """Prefers clients by their accuracy on test data."""

    def ask(self, round_: int, available: list[int], size: int, losses: Any) -> list[int]:
        seen = {row["client"]: row["test_accuracy"] for row in self.told}
        return sorted(available, key=lambda c: (seen.get(c, 0.0), self.rng.random()))[:size]


class Crashes(Uniform):
    """Fails until it has been told something."""

    def ask(self, round_: int, available: list[int], size: int, losses: Any) -> list[int]:
        self.told[0]
        return super().ask(round_, available, size, losses)


def test_a_right_one_agrees() -> None:
    report = check_as(Uniform, "uniform")
    assert report.agrees, report.sentences()
    assert report.sentences()[0].startswith("Nothing tells it from uniform")


def test_a_right_one_that_asks_for_losses_agrees() -> None:
    report = check_as(PowerOfChoice, "power-of-choice")
    assert report.agrees, report.sentences()
    assert report.depends["loss"] == (True, True) and report.depends["duration"] == (False, False)


def test_wrong_indices_are_found_in_the_first_round() -> None:
    report = check_as(WrongIndices, "power-of-choice")
    assert not report.agrees and report.differs[0][0] == 0


def test_a_ratio_under_the_name_of_oort_is_found_and_locks_in() -> None:
    report = check_as(LastLossOverDuration, "oort")
    assert report.differs and report.locks_in
    assert report.depends["size"] == (False, True)  # Oort's utility counts samples
    assert report.follows["times it was picked"] > 5


def test_looking_at_test_data_is_found() -> None:
    report = check_as(Peeks, "uniform")
    assert report.depends["test accuracy"] == (True, False)
    assert any("accuracy on test data" in line for line in report.sentences())


def test_a_cold_start_that_fails_is_named() -> None:
    report = check_as(Crashes, "uniform")
    assert list(report.crashes) == [0] and "IndexError" in report.crashes[0][0]
    assert not report.differs


def test_a_method_that_starts_from_coins_is_refused() -> None:
    with pytest.raises(ValueError, match="fedcm-ucb"):
        check_as(Uniform, "fedcm-ucb")


def test_the_commands(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.py"
    theirs.write_text(
        "class Mine:\n"
        "    def __init__(self, clients, sizes, seed): pass\n"
        "    def ask(self, round, available, size, losses): return available[:size]\n"
        "    def tell(self, round, results): pass\n"
    )
    done = CliRunner().invoke(app, ["check", f"{theirs}:Mine", "--as", "uniform"])
    assert done.exit_code == 1 and "Round 0 is the first" in done.output and "It locks in" in done.output
    assert CliRunner().invoke(app, ["check", str(theirs), "--as", "uniforn"]).exit_code == 1
    written = CliRunner().invoke(vectors, ["write", "uniform", "--out", str(tmp_path)])
    assert written.exit_code == 0 and (tmp_path / "uniform.json").is_file()
    assert "uniform: ok" in CliRunner().invoke(vectors, ["check", "uniform"]).output
    with pytest.raises(ValueError, match=r"no file"):
        load_stranger("nowhere.py")
