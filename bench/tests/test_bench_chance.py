"""The benchmark says nothing that chance explains: equal selectors, lost runs, missing seeds and unknown groups."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from fedcohort.core.errors import InputError
from fedcohort.simulate.leaderboard import Options, RunNumbers, leaderboard
from fedcohort_bench.benchmark import VERSION
from fedcohort_bench.benchmark import scores as scoring
from fedcohort_bench.benchmark.frozen import Frozen
from fedcohort_bench.benchmark.page import claims, matrix, minorities, page, robustness
from fedcohort_bench.benchmark.scores import Scores, SelectorScore, least_by_chance, score

SLOW = [pytest.param(1000, marks=pytest.mark.slow), 150]
SETTINGS = [f"s{i}" for i in range(30)]


def allowed(trials):
    return 0.06 if trials >= 1000 else 0.05 + 2.6 * math.sqrt(0.05 * 0.95 / trials)


def draw(rng, seeds, gain=0.0, sd=1.0):
    gains, groups = ({name: rng.normal(gain, sd, seeds) for name in SETTINGS} for _ in range(2))
    return SelectorScore("a", gains, minority=groups)


@pytest.mark.parametrize("trials", SLOW)
@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_a_selector_equal_to_uniform_gains_and_loses_nowhere(seeds, trials):
    rng = np.random.default_rng(seeds)
    said = [draw(rng, seeds).sentence for _ in range(trials)]
    assert np.mean(["in 30 of 30 settings" not in text for text in said]) <= allowed(trials)


@pytest.mark.parametrize("trials", SLOW)
@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_a_loss_of_just_half_a_point_is_open_in_all_settings(seeds, trials):
    rng = np.random.default_rng(10 + seeds)
    wrong = 0
    for _ in range(trials):
        found = draw(rng, seeds, gain=-0.5).claims
        wrong += any(word != "open" for claim in found for word in (claim.verdict, claim.minority_verdict))
    assert wrong / trials <= allowed(trials)


@pytest.mark.parametrize("trials", SLOW)
@pytest.mark.parametrize("seeds", [5, 10])
def test_intervals_of_a_setting_and_of_the_mean_gain_cover_the_truth(seeds, trials):
    rng = np.random.default_rng(20 + seeds)
    held = []
    for _ in range(trials):
        one = draw(rng, seeds, gain=1.0)
        (mean, half, _), group = (one.claims[0].to_dict()[key] for key in ("mean", "worst_group"))
        held.append((abs(mean - 1) <= half, abs(group[0] - 1) <= group[1], abs(one.mean - 1) <= one.interval))
    slack = 0.0 if trials >= 1000 else 0.05
    assert (np.mean(held, axis=0) >= 0.93 - slack).all() and (np.mean(held, axis=0) <= 0.97 + slack).all()


def test_one_seed_is_open_whatever_the_loss():
    one = SelectorScore("balanced", {"x": np.array([-9.0])}, minority={"x": np.array([-30.0])})
    (claim,) = one.claims
    assert claim.verdict == claim.minority_verdict == "open" and one.sentence.endswith("everything is open.")
    assert math.isnan(one.worst_by_chance)


@pytest.mark.parametrize("errors", [np.ones(30), np.linspace(0.1, 3, 30)])
def test_the_worst_of_many_settings_stands_beside_what_no_difference_would_give(errors):
    rng = np.random.default_rng(1)
    simulated = rng.normal(0, errors, (20000, 30)).min(axis=1).mean()
    scaled = np.array([-1.0, 0.0, 1.0]) * math.sqrt(3)  # standard error 1
    assert least_by_chance([e * scaled for e in errors]) == pytest.approx(simulated, abs=0.03)
    one = draw(rng, 5)
    scores = Scores("digits", (1, 2, 3, 4, 5), 60, tuple(SETTINGS), (one,), True, Frozen(VERSION, {}))
    assert f"({one.worst_by_chance:+.1f})" in matrix(scores).rows[0][2].note and "In brackets" in matrix(scores).note
    assert one.worst_by_chance == pytest.approx(-0.91, abs=0.2)  # as the issue of a mean of -0.91 where all gains are 0


# -- scores of runs that are incomplete --------------------------------------------------------------------------------


def run(label, seed, end, *, rounds=60, arrives=10, state="finished", group=0.5, cost=1.0):
    accuracy = np.where(np.arange(rounds) >= arrives - 1, end, 0.1)
    values = {"accuracy": accuracy, "clock": cost * np.arange(1.0, rounds + 1), "bytes_down": np.full(rounds, 2e6)}
    values["worst_group"] = np.full(rounds, group)
    return RunNumbers(label, label, seed, state, np.arange(rounds), values)


@pytest.fixture
def scored(monkeypatch):
    """Score runs by setting as if an experiment had stored them."""
    monkeypatch.setattr(scoring, "merge_frozen", lambda folders: Frozen(VERSION, {}))

    def of(**settings):
        boards = [leaderboard(name, runs, Options(targets=(0.4,), terminal=10)) for name, runs in settings.items()]
        config = {"data": {"name": "digits"}, "run": {"rounds": 60}}
        return score(SimpleNamespace(path=None, config=config, leaderboards=lambda baseline: boards))

    return of


def test_a_seed_that_some_runs_lack_is_left_out_and_named(scored):
    runs = [run(label, seed, 0.5 + 0.1 * (label == "ours")) for label in ("uniform", "ours") for seed in (1, 2, 3)]
    scores = scored(iid=runs, noise=[r for r in runs if (r.label, r.seed) != ("ours", 2)])
    assert scores.seeds == (1, 3) and scores.left_out == ("seed 2",)
    assert all(len(values) == 2 for values in scores.lines[0].gain.values()) and "seed 2" in page(scores)
    with pytest.raises(InputError, match="No seed"):
        scored(iid=[r for r in runs if (r.label == "ours") == (r.seed == 2)])
    other = scored(iid=runs, noise=[r for r in runs if r.label == "uniform"] + [run("x", s, 0.5) for s in (1, 2, 3)])
    assert other.lines == () and other.left_out == ("ours", "x")


def test_an_unknown_worst_group_leaves_out_that_seed_alone(scored):
    runs = [run("uniform", seed, 0.5) for seed in (1, 2, 3)]
    runs += [run("ours", seed, 0.5, group=math.nan if seed == 2 else 0.3 + seed / 100) for seed in (1, 2, 3)]
    scores = scored(iid=runs)
    assert scores.lines[0].minority["iid"] == pytest.approx([-19.0, -17.0])
    assert minorities(scores).rows[0][-1].note == "2 of 3 seeds"


def test_a_lost_run_is_counted_instead_of_judged(scored):
    runs = [run("uniform", seed, 0.5) for seed in range(10)]
    runs += [run("ours", seed, 0.6 + seed / 1000, state="diverged" if seed == 4 else "finished") for seed in range(10)]
    scores = scored(iid=runs, noise=[replace_state(r, "finished") for r in runs])
    (line,) = scores.lines
    assert line.lost == {"iid": 1, "noise": 0} and math.isnan(line.interval)
    assert [claim.verdict for claim in line.claims] == ["1 of 10 lost", "no worse"]
    assert "gains in noise" in line.sentence and "lost runs in iid" in line.sentence
    assert robustness(scores).rows[0][4].text == "1" and "1 of 10 lost" in str(claims(scores, "ours").rows)
    assert Scores.from_dict(scores.to_dict()).to_dict() == scores.to_dict()


def replace_state(each, state):
    return replace(each, state=state)


def test_a_third_selector_with_cheap_rounds_changes_no_speed(scored):
    runs = [run("uniform", seed, 0.5, arrives=40) for seed in (1, 2)]
    runs += [run("ours", seed, 0.5, arrives=20) for seed in (1, 2)]
    cheap = [run("cheap", seed, 0.5, cost=0.01) for seed in (1, 2)]
    for scores in (scored(iid=runs), scored(iid=runs + cheap)):
        line = next(line for line in scores.lines if line.label == "ours")
        assert {m: str(line.speed(m)) for m in ("rounds", "seconds", "bytes")} == dict.fromkeys(
            ("rounds", "seconds", "bytes"), "2.00×"
        )


def test_runs_that_never_arrive_give_a_bound(scored):
    runs = [run("uniform", seed, 0.5, arrives=30) for seed in (1, 2)]
    runs += [run("ours", seed, 0.35, arrives=20) for seed in (1, 2)] + [run("other", seed, 0.5) for seed in (1, 2)]
    line = next(line for line in scored(iid=runs).lines if line.label == "ours")
    assert str(line.speed("seconds")) == "≤0.50×" and line.reach_share == 0
