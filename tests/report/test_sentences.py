"""Every sentence of a report, on data for which it is true and on data for which the opposite is true."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fedcohort.core.plots import SelectorRun
from fedcohort.core.protocol import SELECTORS
from fedcohort.report import figures
from fedcohort.report.data import RunCurve, SelectorRuns, Setting, boards
from fedcohort.report.sweep import sweep
from fedcohort.simulate.leaderboard import Options
from fedcohort.simulate.store.results import FederationFacts


def run(label, accuracy, *, seed=1, state="finished", picks=(), **columns):
    rounds = np.arange(len(accuracy))
    empty = ("loss", "qcid", "clock", "seconds", "query_seconds", "client_seconds", "query_client_seconds",
             "bytes_down", "bytes_up", "query_bytes_down", "query_bytes_up", "available")  # fmt: skip
    values = {name: np.full(len(rounds), np.nan) for name in empty}
    values |= {name: np.broadcast_to(np.asarray(v, float), len(rounds)).copy() for name, v in columns.items()}
    values["accuracy"] = np.asarray(accuracy, float)
    clients = np.array([c for cohort in picks for c in cohort], np.int64)
    pick_round = np.repeat(np.arange(len(picks)), [len(cohort) for cohort in picks])
    return RunCurve(label, label, seed, state, rounds, values, f"{label}-s{seed}", "f", {}, pick_round, clients, None)


def setting(*runs, clients=4, planned=None, federations=None):
    labels = list(dict.fromkeys(r.label for r in runs))
    groups = tuple(
        SelectorRuns(label, label, tuple(r for r in runs if r.label == label), i, 0) for i, label in enumerate(labels)
    )
    return Setting(
        "all runs", groups, clients, federations or {}, max(len(r.round) for r in runs), Options(planned=planned)
    )


def cost(*runs):
    made = setting(*runs)
    return figures.cost(made, boards([made])[0])


def accuracy(*runs, planned=None, **options):
    made = setting(*runs, planned=planned)
    return figures.accuracy(made, boards([made], **options)[0]).sentence


# -- accuracy -------------------------------------------------------------------------------------------------------


def test_the_sentence_says_how_many_runs_reach_the_target():
    slow, quick, never = [0.1, 0.2, 0.5, 0.5], [0.5, 0.5, 0.5, 0.5], [0.1, 0.1, 0.1, 0.1]
    both = [run("uniform", slow), run("uniform", slow, seed=2)]
    text = accuracy(*both, run("ours", quick), run("ours", never, seed=2), targets=(0.5,))
    assert "50%" in text and "uniform 2 of 2" in text and "ours 1 of 2" in text
    assert accuracy(*both, targets=(0.5,)).startswith("Every run reaches 50%")
    assert accuracy(*both, targets=(0.9,)).startswith("No run reaches 90%")
    going = [run("uniform", np.full(62, 0.3), state="running"), run("ours", np.full(9, 0.4), state="running")]
    assert accuracy(*going, planned=2000).startswith("So far (round 9 to 62 of 2,000): ")
    assert "So far" not in accuracy(run("uniform", np.full(62, 0.3)), planned=62)


# -- loss, balance, picks, participation ----------------------------------------------------------------------------


def test_balance():
    text = figures.balance(setting(run("uniform", [0.5], qcid=0.5), run("ours", [0.5], qcid=0.1))).sentence
    assert text.startswith("Mean class imbalance (QCID) of a cohort: uniform 0.5 and ours 0.1; 0 is perfectly")


def test_participation():
    one = run("ours", [0.5] * 4, picks=[[0]] * 4)
    all_ = run("uniform", [0.5] * 4, picks=[[0], [1], [2], [3]])
    assert "Gini coefficient: ours 0.75 and uniform 0.00; 0 is" in figures.participation(setting(one, all_)).sentence


# -- cost -----------------------------------------------------------------------------------------------------------


def test_a_share_of_bytes_is_not_an_amount():
    small = run("frugal", [0.5], bytes_up=1e6, query_bytes_up=1e6, seconds=1.0)  # half of its bytes, but few
    large = run("greedy", [0.5], bytes_up=99e6, query_bytes_up=11e6, seconds=1.0)
    text = cost(small, large).sentence
    assert text.startswith(
        "Queries before choosing, and their share of the traffic: frugal 1.00 MB (50.0%) and greedy 11.0 MB (10.0%)."
    )
    nobody = cost(run("uniform", [0.5], bytes_up=1e6, seconds=1.0)).sentence
    assert nobody.startswith("No selector asked clients anything before choosing, so every byte went into training.")


def test_runs_of_different_length_are_compared_per_round():
    long, short = (
        run("uniform", [0.5] * 10, seconds=1.0, bytes_up=1.0),
        run("ours", [0.5] * 10, seconds=3.0, bytes_up=1.0),
    )
    assert "A round takes: uniform 1.0 s and ours 3.0 s." in cost(long, short).sentence
    stopped = run("ours", [0.5] * 2, seconds=3.0, bytes_up=1.0, state="stopped")  # 6 s in all against 10 s
    assert "A round takes: uniform 1.0 s and ours 3.0 s." in cost(long, stopped).sentence


# -- what selectors learned -----------------------------------------------------------------------------------------


def shown(selector, state, *, noise=None, counts=None, notes=(), running=False):
    """The sentence of a selector's own figure."""
    (picture,) = SELECTORS.get(selector).pictures
    return picture.view(
        SelectorRun(
            label="ours",
            seed=3,
            rounds=30,
            state=state,
            notes=notes,
            label_counts=None if counts is None else np.asarray(counts, float),
            noise=None if noise is None else np.asarray(noise, float),
            running=running,
        )
    ).text


def thompson(kept, dropped):
    return {"kept": np.asarray(kept, float) + 1, "dropped": np.asarray(dropped, float) + 1}


def test_an_estimate_is_not_a_frequency():
    text = shown("fedcm-ts", thompson([4, 0, 1, 0], [0, 1, 1, 0]))
    assert "client 0 has the highest estimated chance of being kept, 83% (kept 4 of 4 times)" in text
    assert "client 1 the lowest, 33% (kept 0 of 1 time)" in text
    text = shown("fedcm-ts", thompson([0, 4, 0], [1, 0, 0]))
    assert "client 1 has the highest" in text and "client 0 the lowest, 33% (kept 0 of 1 time)" in text
    fresh = shown("fedcm-ts", thompson([0, 0, 0], [0, 0, 0]))
    assert "every client has the same estimated chance" in fresh and "highest" not in fresh
    ucb = shown("fedcm-ts", {"mean": np.array([1.0, 0.0, 0.5]), "pulls": np.array([1.0, 3.0, 2.0])})
    assert "100% (never asked)" in ucb and "0% (asked 2 times)" in ucb


@pytest.mark.parametrize(
    ("noise", "expected"),
    [
        ([0.0, 0.2, 0.5], "get lower estimates, as they should (rank correlation −1.00, −1 would be perfect)"),
        ([0.5, 0.2, 0.0], "get higher estimates, the wrong way round (rank correlation +1.00, −1 would be perfect)"),
    ],
)
def test_a_negative_correlation_with_noise_is_said_to_be_good(noise, expected):
    assert expected in shown("fedcm-ts", thompson([9, 5, 0], [0, 4, 9]), noise=noise)


def duels(wins, losses):
    wins, losses = np.asarray(wins, float), np.asarray(losses, float)
    return {"wins": wins, "losses": losses, "rounds": np.ones(len(wins))}


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([[5, 5], [7, 3], [9, 1]], "the fewer duels it is expected to win, as it should be (rank correlation −1.00"),
        ([[9, 1], [7, 3], [5, 5]], "the more duels it is expected to win, the wrong way round (rank correlation +1.00"),
        ([[7, 3], [7, 3], [7, 3]], "there is nothing to compare"),
    ],
)
def test_skewness_says_whether_the_ranking_is_right(counts, expected):
    text = shown("fedacs", duels([3, 1, 0], [0, 1, 1]), counts=counts)
    assert expected in text
    assert "client 0 is ranked as the least skewed (won 100% of its duels)" in text  # not 80%, the posterior mean
    assert "client 2 as the most (won 0% of its duels)" in text


def test_skewness_of_a_client_that_was_never_in_a_duel():
    assert "(never in a duel)" in shown("fedacs", duels([0, 0], [0, 1]))


def test_the_map_compares_with_chance_and_says_when_it_is_worse():
    corner = np.array([[0, 0], [0.1, 0], [0, 0.1], [9, 9], [9.1, 9], [9, 9.1]], float)
    alike = [[1, 0]] * 3 + [[0, 1]] * 3
    text = shown("fedcor", {"embedding": corner, "samples": 9}, counts=alike)
    assert "100% of the clients have a nearest neighbour of the same main class; by chance it would be 40%" in text
    assert "move together" in text
    pairs = np.array([[0, 0], [0, 0.1], [5, 0], [5, 0.1], [0, 5], [0, 5.1]], float)
    text = shown("fedcor", {"embedding": pairs, "samples": 9}, counts=[[1, 0], [0, 1]] * 3)
    assert "0% of the clients" in text and "does not follow the classes" in text and "move together" not in text


@pytest.mark.parametrize(("sign", "word"), [(1, "more"), (-1, "less")])
def test_coefficients_say_which_way(sign, word):
    rows = [(t, {"theta loss": sign * 2.0, "theta duration": 0.5}) for t in range(3)]
    text = shown("flash", {}, notes=rows)
    assert (
        "the largest coefficient is that of loss" in text and f"the higher a client's loss, the {word} reward" in text
    )
    assert "After" not in text
    running = shown("flash", {}, notes=rows, running=True)
    assert running.startswith("After 30 rounds, with ours (seed 3)")
    nothing = [(0, {"theta loss": 0.0})]
    assert "nothing has been learned" in shown("flash", {}, notes=nothing)


# -- sweeps ---------------------------------------------------------------------------------------------------------


def swept(ends, key="rate", **more):
    """The figure of a sweep: where each seed ends, by value; uniform always ends at 50%."""
    runs = [run("uniform", [0.5], seed=s) for s in range(len(next(iter(ends.values()))))]
    for value, seeds in ends.items():
        for seed, end in enumerate(seeds):
            made = run(f"ours {key}={value}", [end if end is not None else 0.9], seed=seed)
            state = "finished" if end is not None else "diverged"
            runs.append(dataclasses.replace(made, selector="ours", params={key: value, **more}, state=state))
    made = setting(*runs)
    groups = tuple(dataclasses.replace(g, selector=g.runs[0].selector) for g in made.groups)
    made = dataclasses.replace(made, groups=groups)
    return sweep(made, boards([made])[0])


def test_the_best_of_a_sweep_is_judged_on_other_seeds():
    found = swept({1: [0.9, 0.9, 0.3, 0.3], 2: [0.6, 0.6, 0.8, 0.8]})
    chosen, confirmed = found.sentence.split(". ")
    assert "rate 1 is best on seeds 0 and 1 (90.0%)" in chosen
    assert "seeds 2 and 3" in confirmed and "at 30.0% and uniform at 50.0%" in confirmed
    (view,) = found.spec["views"]
    assert view["series"][0]["x"] == [1.0, 2.0] and view["series"][0]["y"] == [0.6, 0.7]
    assert "rate 2 is best on seed 0 (60.0%)" in swept({1: [0.3, 0.9], 2: [0.6, 0.1]}).sentence


def test_a_value_that_lost_a_run_is_never_best_and_one_seed_confirms_nothing():
    assert "With ours, rate 2 is best" in swept({1: [0.99, None], 2: [0.6, 0.6]}).sentence
    assert swept({1: [None], 2: [None]}).sentence == "With ours, every value of rate lost a run."
    assert "no other seed" in swept({1: [0.6], 2: [0.7]}).sentence
    assert swept({1: [0.6, 0.6]}) is None and swept({"a": [0.6], "b": [0.7]}) is None  # nothing to draw against


def test_values_over_several_magnitudes_are_drawn_by_their_logarithm():
    (view,) = swept({0.01: [0.6], 0.1: [0.7], 1: [0.6]}).spec["views"]
    assert view["x"]["label"] == "log10 of rate" and view["series"][0]["x"] == [-2.0, -1.0, 0.0]


# -- the federation -------------------------------------------------------------------------------------------------


def test_the_scenario_is_described_by_what_clients_hold():
    def text(counts, noise=0.0):
        counts = np.asarray(counts, float)
        facts = FederationFacts(counts, counts, counts.sum(axis=1), np.full(len(counts), noise), None)
        return figures.scenario(setting(run("uniform", [0.5]), federations={"f": facts})).sentence

    single = text([[10, 0, 0], [0, 5, 0], [0, 0, 7]])
    assert single == "3 clients, 3 classes. A client holds 5 to 10 samples of a single class."
    assert "wrong" not in single
    assert text([[600, 0], [0, 600]]) == "2 clients, 2 classes. Every client holds 600 samples of a single class."
    mixed = text([[3, 7, 0], [5, 5, 0], [9, 1, 0]])
    assert mixed.endswith("holds 10 samples of 2 classes; for half of the clients, one class makes up 70% or more.")
    assert "1 to 3 classes" in text([[3, 3, 3], [9, 0, 0]])
    even = text([[4, 4, 4], [4, 4, 4], [4, 4, 4]], noise=0.25)
    assert "12 samples of 3 classes" in even and "33% or more" in even and "25% of a client's labels are wrong" in even


def test_numbers_that_are_not_known_do_not_break_sentences():
    text = accuracy(run("uniform", [0.3, 0.2], state="diverged"))
    assert "nan" not in text.lower() and text.startswith("No selector has a terminal accuracy")


def test_ranks_over_settings_say_so():
    made = [
        setting(*(run(label, [value], seed=s) for s in (1, 2) for label, value in (("uniform", 0.5), ("ours", 0.6))))
    ]
    every = boards(made)
    text = figures.ranks(made[0], every[0], [every[0], every[0], every[0]]).sentence
    assert "Over 3 settings" in text
    assert "settings" not in figures.ranks(made[0], every[0]).sentence


def test_ranks_claim_a_difference_only_where_there_is_one():
    def text(better):
        runs = [run("uniform", [0.5], seed=s) for s in range(10)]
        runs += [run("ours", [0.5 + better(s)], seed=s) for s in range(10)]
        made = setting(*runs)
        return figures.ranks(made, boards([made])[0]).sentence

    assert text(lambda s: 0.1).startswith(
        "ours has the best mean rank over 10 seeds (1 of 2; Friedman, p = 0.002); it is"
    )
    assert "it is better than uniform by the critical difference of 0.62 or more." in text(lambda s: 0.1)
    assert text(lambda s: -0.1).startswith("uniform has the best mean rank")
    assert text(lambda s: 0.1 * (-1) ** s).startswith(
        "Over 10 seeds, the selectors cannot be told apart (Friedman, p = 1"
    )
    one = setting(run("uniform", [0.5]), run("ours", [0.6]))
    assert figures.ranks(one, boards([one])[0]) is None
