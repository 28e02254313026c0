"""Test vectors against brute force that reads only JSON, and the check of strangers against right and wrong ones."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedcohort.cli.app import app
from fedcohort_bench.cli.vectors import vectors
from fedcohort_bench.vectors import DATA, check_as, load_stranger, verify
from fedcohort_bench.vectors.files import difference, names

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


def test_a_changed_vector_is_noticed(tmp_path: Path) -> None:
    changed = vector("oort")
    changed["rounds"][3]["expected"]["scores"]["5"] += 0.01
    (tmp_path / "oort.json").write_text(json.dumps(changed))
    ((name, problem),) = verify(tmp_path, ["oort"])
    assert name == "oort" and problem.startswith("rounds[3].expected.scores.5 is ")
    assert difference({"a": [1, 2]}, {"a": [1, 3]}) == "a[1] is 2, expected 3"


# -- brute force: plain Python that knows a method from its paper and a run from the file -----------------------------


def uniform(v: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for entry in v["rounds"]:
        yield {"chance": {c: entry["size"] / len(entry["available"]) for c in entry["available"]}}


def power_of_choice(v: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for entry in v["rounds"]:
        ranked = sorted(zip(entry["question"]["loss"], entry["question"]["asked"], strict=True), reverse=True)
        yield {"always": sorted(client for _, client in ranked[: entry["size"]])}


def oort(v: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Algorithm 1 and Eq. 1, with the median of the first durations as the preferred one."""
    size, utility, last, seconds, preferred = v["sizes"], {}, {}, {}, 0.0
    for entry in v["rounds"]:
        t = entry["round"] + 1
        known = [c for c in entry["available"] if c in utility]
        scores = {}
        if known:
            ordered = sorted(utility[c] for c in known)
            at = 0.95 * (len(ordered) - 1)
            low = ordered[int(at)]
            high = ordered[min(int(at) + 1, len(ordered) - 1)]
            cap = low + (high - low) * (at - int(at))
            for c in known:
                scores[c] = min(utility[c], cap) + math.sqrt(0.1 * math.log(t) / last[c])
                if seconds[c] > preferred > 0:
                    scores[c] *= (preferred / seconds[c]) ** 2
        yield {"scores": scores}
        arrived = [row for row in entry["reports"] if row["ok"]]
        for row in arrived:
            c = row["client"]
            utility[c], last[c], seconds[c] = size[c] * row["loss_rms"], t, row["duration"]
        if not preferred:
            preferred = statistics.median(row["duration"] for row in arrived)


def fedcm_ucb(v: dict[str, Any]) -> Iterator[dict[str, Any]]:
    mean, pulls = list(v["start"]["mean"]), [1.0] * v["clients"]
    for entry in v["rounds"]:
        t = entry["round"] + 1
        scores = {c: mean[c] + math.sqrt(3 * math.log(t) / (2 * pulls[c])) for c in entry["available"]}
        cut = sorted(scores.values())[-entry["size"]]
        yield {"scores": scores, "always": [c for c, s in scores.items() if s > cut]}
        for row in entry["reports"]:
            c = row["client"]
            mean[c] = (pulls[c] * mean[c] + row["kept"]) / (pulls[c] + 1)
            pulls[c] += 1


@pytest.mark.parametrize("brute_force", [uniform, power_of_choice, oort, fedcm_ucb])
def test_the_vectors_are_what_the_paper_computes(brute_force: Any) -> None:
    v = vector(brute_force.__name__.replace("_", "-"))
    for entry, wanted in zip(v["rounds"], brute_force(v), strict=True):
        expected = entry["expected"]
        if "scores" in wanted:
            assert set(expected["scores"]) == {str(c) for c in wanted["scores"]}
            for client, score in wanted["scores"].items():
                assert expected["scores"][str(client)] == pytest.approx(score, rel=1e-6)
        if "chance" in wanted:
            spread = math.sqrt(0.25 / expected["draws"])
            assert set(expected["probabilities"]) == {str(c) for c in wanted["chance"]}
            for client, chance in wanted["chance"].items():
                assert expected["probabilities"][str(client)] == pytest.approx(chance, abs=4.5 * spread)
        assert set(wanted.get("always", ())) <= set(expected["always"])


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
