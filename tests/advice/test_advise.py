"""The commands twin and advise, from journals of loops and of the simulator to pages, and the decisions they make."""

import json
import tomllib

import numpy as np
import pytest

import fedcohort as fc
from fedcohort.advice.drift import changes
from fedcohort.advice.fit import Fit
from fedcohort.advice.record import read_record
from fedcohort.advice.trial import Outcome, Way, judge, predicted, ways
from fedcohort.advice.twin import Learning
from fedcohort.cli.app import main
from fedcohort.selectors import Uniform


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    def call(*arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.argv", ["fedcohort", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        assert ended.value.code == 0, said.err
        return said.out

    return call


def test_a_twin_runs_and_behaves_like_the_record(loop, command, tmp_path):
    def seconds(client, round, rng):
        return (60.0 if client % 4 == 0 else 20.0) * np.exp(0.1 * rng.standard_normal())

    journal = loop(clients=12, cohort=4, rounds=10, seconds=seconds)
    said = json.loads(command("twin", journal, "-o", "twin.toml", "--page", "twin.html", "--format", "json"))
    assert {"Fitted", "Assumed"} <= set(said)
    assert "<figure" in (tmp_path / "twin.html").read_text()
    table = tomllib.loads((tmp_path / "twin.toml").read_text())
    results = fc.run({**table, "selectors": {"all": {}}, "run": {**table["run"], "cohort": 12}}, quiet=True)
    took = results.members(results.runs[0])
    slow = took["client"] % 4 == 0
    assert np.median(took["seconds"][slow]) == pytest.approx(60, rel=0.1)
    assert np.median(took["seconds"][~slow]) == pytest.approx(20, rel=0.1)


def test_advice_is_a_page_and_the_same_when_it_is_asked_for_again(loop, command, tmp_path):
    journal = loop(clients=8, cohort=2, rounds=8, timed=False, score=None)
    arguments = ("advise", journal, "--twins", "4", "-q", "--format", "json", "-o", "advice.html")
    first = json.loads(command(*arguments))
    assert "how long each client takes" in " ".join(first["record"])
    assert first["ways"][0]["way"] == "as recorded" and "cannot tell" in first["headline"]
    assert all("at work" not in row["way"] and "deadline" not in row["way"] for row in first["ways"])
    assert "What to do" in (tmp_path / "advice.html").read_text()
    assert json.loads(command(*arguments)) == first
    # Chance in one twin says nothing about another, and all ways meet the same.
    of_way = [
        {(i.setting["name"], i.seed) for i in fc.load(f).runs}
        for f in tmp_path.glob("*.advice/*")
        if f.name[:3] not in ("cal", "twi")
    ]
    assert len(of_way) == len(first["ways"]) and all(seeds == of_way[0] for seeds in of_way)
    assert len({seed for _, seed in of_way[0]}) == 8


def outcome(name, logs):
    values = np.ones(len(logs))
    return Outcome(Way(name, {}), np.array(logs), 0.0, values, values, values, values, values)


def learned(fits=True):
    return Learning(((0.1, 0.0, None),), np.ones(1), "", fits, np.zeros((0, 5)))


@pytest.fixture
def fit(loop):
    return Fit(read_record(loop(rounds=10)))


def test_chance_claims_nothing(fit):
    rng = np.random.default_rng(1)
    claims = 0
    for _ in range(300):
        others = [outcome(f"w{i}", rng.normal(0, 0.3, 12)) for i in range(8)]
        claims += judge(fit, learned(), [outcome("as recorded", np.zeros(12)), *others], []).best is not None
    assert claims <= 0.05 * 300


def test_the_way_that_is_surely_faster_is_advised_unless_nothing_can_be_said(fit):
    logs = 0.7 + np.random.default_rng(2).normal(0, 0.05, 12)
    outcomes = [outcome("as recorded", np.zeros(12)), outcome("fast", logs), outcome("slow", -logs)]
    assert judge(fit, learned(), outcomes, []).best.way.name == "fast"
    for verdict in (judge(fit, learned(False), outcomes, []), judge(fit, learned(), outcomes, ["it changed"])):
        assert verdict.best is None and "cannot tell" in verdict.headline and verdict.missing


def test_nobody_ever_answered(loop):
    fit = Fit(read_record(loop(rounds=10, fails=lambda client, round, rng: True)))
    verdict = judge(fit, learned(), [outcome("as recorded", np.zeros(4)), outcome("fast", np.full(4, 0.5))], [])
    assert verdict.best is None and "cannot tell" in verdict.headline


def test_an_interval_for_one_more_holds_one_more_in_95_of_100_cases():
    rng = np.random.default_rng(3)
    inside = 0
    for _ in range(2000):
        *seen, new = rng.normal(0.2, 0.4, 11)
        _, low, high = predicted(np.array(seen))
        inside += low <= np.exp(new) <= high
    assert 0.93 < inside / 2000 < 0.97


def test_a_journal_of_a_run_without_rounds(tmp_path):
    table = {
        "name": "x", "data": {"name": "synthetic", "samples": 600, "test_samples": 100}, "selectors": {"uniform": {}},
        "aggregator": {"name": "fedbuff"}, "run": {"rounds": 60, "cohort": 6, "mode": "async", "buffer": 3},
        "scenario": {
            "partition": {"name": "iid", "clients": 20},
            "devices": {"speed": 1.0, "speed_spread": 0.5, "states": {"online": {"session": 900, "gap": 900}}},
        },
    }  # fmt: skip
    results = fc.run(table, out=tmp_path / "x", quiet=True)
    record = read_record(results.journal(results.runs[0]))
    fit = Fit(record)
    assert record.buffer in (3, 4) and 3 <= record.cohort <= 8
    assert fit.population.between == pytest.approx(0.5, abs=0.25)
    assert 200 < fit.session < 4000
    assert {"in rounds", "as recorded"} <= {way.name for way in ways(fit)}
    changes(record)


def test_interrupted_twins_continue_as_if_they_had_not_been(tmp_path, monkeypatch):
    from fedcohort.advice import twin
    from fedcohort.simulate.rounds.listener import Listener

    table = {
        "data": {"name": "synthetic", "samples": 200, "test_samples": 50}, "seeds": twin.SEEDS,
        "run": {"rounds": 8, "cohort": 3, "checkpoint_seconds": 0.0, "processes": 1},
        "settings": [{"name": str(i), "scenario": {"partition": {"name": "iid", "clients": 6 + i}}} for i in range(2)],
    }  # fmt: skip
    whole = twin.played(table, tmp_path / "whole", own_seeds=True)
    play = twin.play

    def stopped(simulation, console):
        class Stop(Listener):
            def on_round(self, run, row):
                simulation.stop()

        simulation.listeners.append(Stop())
        return play(simulation, console)

    monkeypatch.setattr(twin, "play", stopped)
    with pytest.raises(KeyboardInterrupt):
        twin.played(table, tmp_path / "parts", own_seeds=True)
    monkeypatch.setattr(twin, "play", play)
    parts = twin.played(table, tmp_path / "parts", own_seeds=True)
    assert {run.seed for run in parts.runs} == {0, 1, 2, 3}
    for one, other in zip(whole.runs, parts.runs, strict=True):
        assert one.id == other.id and (twin.scores(whole, one)[1] == twin.scores(parts, other)[1]).all()
        assert len(twin.scores(parts, other)[0]) == 8


class Own(Uniform):
    """Is not registered."""


class Breaking(Uniform):
    """Learns from the loop's rounds, and then from no other."""

    def update(self, state, outcome):
        if outcome.round >= 12:
            raise ValueError("broken")
        return super().update(state, outcome)


def test_shadows_in_the_journal_are_compared_and_quoted(loop, command, tmp_path):
    journal = loop(rounds=12, clients=8, cohort=2)
    with fc.Session.open(journal) as session:
        session.add_shadow("mine", fc.create("e3cs", rate=0.25))
        for selector in (Breaking(), "fedcompass"):
            session.try_selector(selector, 1, watch=True)
            cohort = session.ask(2)
            session.tell(fc.RoundReport(cohort.ticket, cohort.clients, metrics={fc.Signal.DURATION: [10.0, 10.0]}))
        session.add_shadow("own code", Own())
        assert list(session.shadows) == ["mine", "own code"]
    fit = Fit(read_record(journal))
    tried = {way.name: way for way in ways(fit)}
    assert {"e3cs", "fedcompass"} <= tried.keys() and not any("Breaking" in name or "Own" in name for name in tried)
    assert tried["e3cs"].change == {"selectors": {"e3cs": dict(fit.record.shadowed["e3cs"])}}
    assert fit.record.shadowed["e3cs"]["rate"] == 0.25 and "shadow e3cs" in tried["e3cs"].how
    assert tried["fedcompass"].how.startswith("fedcohort journal selector")
    told = command("twin", journal, "-q")
    assert "What the journal's shadows say" in told and "mine: over 2 rounds" in told


@pytest.fixture
def hasty(tmp_path):
    """The journal of a simulated run with a deadline that some clients never meet."""
    devices = {"speed": 1.0, "speed_spread": 0.8}
    table = {
        "data": {"name": "synthetic", "samples": 400, "test_samples": 100}, "selectors": {"uniform": {}},
        "run": {"rounds": 12, "cohort": 5},
        "scenario": {"partition": {"name": "iid", "clients": 12}, "devices": devices, "deadline": 45.0},
    }  # fmt: skip
    results = fc.run(table, out=tmp_path / "x", quiet=True)
    return results.journal(results.runs[0])


def test_the_deadline_of_the_recorded_rounds_is_in_the_twin(hasty):
    fit = Fit(read_record(hasty))
    assert fit.record.deadline == pytest.approx(45.0, rel=0.01)
    assert fit.draw(None).seconds.max() > 45.0 and not fit.failed.any()


@pytest.mark.slow
def test_ways_without_the_recorded_deadline_are_tried_too(hasty, command, tmp_path):
    said = json.loads(command("advise", hasty, "--twins", "4", "-q", "--format", "json", "--work", tmp_path / "work"))
    assert any("at work" in row["way"] for row in said["ways"])
    assert any(row["way"] == "automatic deadline" for row in said["ways"])
