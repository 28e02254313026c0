"""What is fitted to a journal, against journals whose truth is known, and journals that know nearly nothing."""

import math
from pathlib import Path

import numpy as np
import pytest

import fedcohort as fc
from fedcohort import Session, Status
from fedcohort.advice.drift import changes
from fedcohort.advice.fit import Fit
from fedcohort.advice.record import read_record
from fedcohort.core.errors import InputError


def fitted(path):
    return Fit(read_record(path))


def test_speeds_and_failures_are_those_of_the_generator(loop):
    usual = np.exp(np.random.default_rng(5).normal(np.log(30), 0.8, 40))
    weak = np.arange(40) % 4 == 0

    def seconds(client, round, rng):
        return usual[client] * np.exp(0.2 * rng.standard_normal())

    def fails(client, round, rng):
        return rng.random() < (0.4 if weak[client] else 0.02)

    fit = fitted(loop(clients=40, cohort=10, rounds=60, seconds=seconds, fails=fails))
    clients = fit.draw(None)
    assert np.corrcoef(np.log(clients.seconds), np.log(usual))[0, 1] > 0.98
    assert fit.population.within == pytest.approx(0.2, rel=0.15)
    assert fit.population.between == pytest.approx(np.log(usual).std(ddof=1), rel=0.25)
    assert clients.failures[weak].mean() > 0.25 and clients.failures[~weak].mean() < 0.08
    assert fit.overhead == pytest.approx(1.0, abs=0.1)
    assert fit.always_on


def test_draws_cover_a_client_that_was_never_asked_and_keep_one_that_was(loop):
    def seconds(client, round, rng):
        return [1.0, 10.0, 100.0][client % 3] * np.exp(0.05 * rng.standard_normal())

    fit = fitted(loop(clients=12, cohort=3, rounds=6, seconds=seconds))
    never, often = int(fit.asked.argmin()), int(fit.asked.argmax())
    assert fit.asked[never] == 0
    draws = np.log([fit.draw(np.random.default_rng(i)).seconds for i in range(60)])
    assert draws[:, often].std() < 0.15 and draws[:, never].std() > 1


def test_presence_lasts_as_long_as_it_did_and_follows_the_day(loop):
    state = {}

    def online(now, rng):
        # Two states that forget at known rates; nobody begins at night.
        if not state:
            state["on"], state["at"] = rng.random(60) < 0.3, now
        on, step = state["on"], 60.0
        while state["at"] < now:
            hour = state["at"] / 3600 % 24
            begins = 0.006 * step / 60 * (1 - 0.9 * (1 - math.cos(2 * math.pi * (hour - 20) / 24)) / 2)
            flips = rng.random(60)
            on = np.where(on, flips > step / 3600, flips < begins)
            state["at"] += step
        state["on"] = on
        return on

    fit = fitted(loop(clients=60, cohort=5, rounds=700, online=online, pause=290.0, timed=True))
    assert 1800 < fit.session < 5400  # one hour
    assert fit.daily > 0.4 and min(abs(fit.peak - 20.5), 24 - abs(fit.peak - 20.5)) < 2.5
    assert 0.02 < fit.share.mean() < 0.4


def test_late_answers_are_at_least_as_slow_as_their_round(tmp_path, loop):
    def fails(client, round, rng):
        return False

    record = read_record(loop(clients=8, cohort=4, rounds=30, fails=fails))
    late = record.client == 3
    # What a host records that hears nothing of late answers: the client's time is that of its round.
    record.status[late], record.answered[late], record.seconds[late] = int(Status.LATE), False, 10.0
    fit = Fit(record)
    assert fit.draw(None).seconds[3] > 10.0 > 0.99 * fit.draw(None).seconds[0]
    assert fit.failed[3] == 0


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"rounds": 3}, "never asked"),
        ({"clients": 1, "cohort": 1, "rounds": 4}, "1 of 1|Failures"),
        ({"fails": lambda client, round, rng: True}, "Nobody was timed|Failures"),
        ({"timed": False, "rounds": 5}, "Nobody was timed"),
        ({"labels": False, "rounds": 5}, "Sizes are not on record"),
        ({"seconds": lambda c, r, g: 1e-9 if c == 3 else 10 + g.random()}, "as fast as 3"),
        ({"seconds": lambda c, r, g: -5.0 if c == 3 else 10 + g.random()}, "impossible"),
        ({"seconds": lambda c, r, g: 1e30 if c == 3 else 10 + g.random()}, "impossible"),
        ({"signals": None}, "Time for a round's work"),
        ({"score": None}, "Failures"),
        ({"score": lambda round: 0.1}, "Failures"),
    ],
    ids=[
        "three rounds",
        "one client",
        "all fail",
        "no times",
        "no facts",
        "a liar",
        "negative",
        "huge",
        "no signals",
        "no curve",
        "flat",
    ],
)
def test_a_journal_that_knows_little_has_a_fit_that_says_so(loop, facts, said):
    import re

    fit = fitted(loop(**facts))
    assert re.search(said, " ".join([*fit.fitted, *fit.assumed]))
    for rng in (None, np.random.default_rng(1)):
        clients = fit.draw(rng)
        assert np.isfinite(clients.failures).all() and ((clients.failures >= 0) & (clients.failures <= 1)).all()
        if clients.seconds is not None:
            assert (clients.seconds > 0).all() and (clients.seconds < 1e6).all()
            assert np.median(clients.seconds) / clients.seconds.min() < 1e3
    changes(fit.record)


def test_a_journal_without_a_finished_round_is_refused(tmp_path):
    with Session("uniform", 3, journal=tmp_path / "new.sqlite") as session:
        session.ask(2)
    with pytest.raises(InputError) as refused:
        read_record(tmp_path / "new.sqlite")
    assert refused.value.hint


def test_forgotten_clients_and_clients_that_left_are_not_in_the_twin(loop):
    path = loop(clients=10, rounds=12)
    with Session.open(path) as session:
        session.leave([2])
    record = read_record(path)
    assert len(record.names) == 9 and "2" not in record.names
    assert record.client.max() < 9 and Fit(record).draw(None).failures.shape == (9,)


@pytest.mark.parametrize("what", ["slower", "failing", "worse", None])
def test_a_change_is_found_and_none_is_found_where_there_is_none(loop, what):
    def seconds(client, round, rng):
        return 10 * np.exp(0.2 * rng.standard_normal()) * (1.5 if what == "slower" and round >= 40 else 1)

    def fails(client, round, rng):
        return rng.random() < (0.5 if what == "failing" and round >= 40 else 0.1)

    noise = np.random.default_rng(2).normal(0, 0.01, 60)

    def score(round):
        base = 0.9 * (1 - 0.9 ** (round + 1)) - (0.25 if what == "worse" and round >= 40 else 0)
        return float(np.clip(base + noise[round], 0, 1))

    found = changes(read_record(loop(clients=12, cohort=6, rounds=60, seconds=seconds, fails=fails, score=score)))
    names = {"slower": "How long", "failing": "How often", "worse": "How well"}
    significant = [change for change in found if change.found]
    assert len(significant) == (what is not None)
    if what is not None:
        assert significant[0].what.startswith(names[what]) and abs(significant[0].round - 40) <= 6


def test_a_change_is_rarely_found_where_there_is_none():
    from fedcohort.advice.drift import _tested

    rng = np.random.default_rng(3)
    p = [_tested("", np.repeat(np.arange(40), 5), rng.standard_normal(200), rng)[1] for _ in range(200)]
    assert 0.01 < np.mean(np.array(p) < 0.05) < 0.1


def test_without_a_test_the_losses_of_clients_are_the_curve(loop):
    record = read_record(loop(score=None, rounds=12, loss=lambda round: 2.0 * 0.9**round))
    assert record.metric == "mean loss of the clients" and not record.is_share
    assert record.curve[:, 1] == pytest.approx(-2.0 * 0.9 ** np.arange(12))


def test_a_long_record_is_compared_with_what_twins_play(loop, monkeypatch):
    from fedcohort.advice import twin

    monkeypatch.setattr(twin, "MAX_ROUNDS", 10)
    monkeypatch.setattr(twin, "played", lambda table, folder: pytest.fail(f"{table['run']['rounds']}"))
    fit = Fit(read_record(loop(rounds=30)))
    with pytest.raises(pytest.fail.Exception, match=r"^10$"):
        twin.calibrate(fit, twin.Stand.of(None), None, Path())
    assert any("first 10" in text for text in fit.assumed)


def test_the_recorded_selector_has_its_parameters_and_knows_no_more_than_it_did(loop):
    from fedcohort.advice.twin import wished

    known = fitted(loop(selector=fc.create("e3cs", rate=0.25), rounds=4))
    assert wished(known)["selectors"]["e3cs"]["rate"] == 0.25 and "labels" not in wished(known)
    blind = fitted(loop("blind.sqlite", selector="balanced", rounds=4, labels=False))
    assert wished(blind)["labels"] == {"name": "none"}
    assert fc.run({**wished(blind), "scenario": {"partition": {"name": "iid", "clients": 8}}}, quiet=True).runs
    blind.record.parameters["no-such"] = 3
    assert wished(blind)["selectors"] == {"balanced": {}}
