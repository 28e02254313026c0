"""Asynchronous runs against a loop that trains one client after the other; their configuration, resume and results."""

import heapq
from contextlib import closing

import numpy as np
import pytest
import torch

from fedcohort.core import rng as streams
from fedcohort.core.errors import FedcohortError, InputError
from fedcohort.core.protocol import Status
from fedcohort.journal import read_journal
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.rounds.prepare import prepare
from fedcohort.simulate.runner import Simulation
from fedcohort.simulate.store.results import load
from tests.experiments import run_experiment

from .lockstep import BASE, group

PHONES = {"speed": 5.0, "speed_spread": 0.7, "bandwidth": 2000.0, "bandwidth_spread": 0.5}
ONLINE = {"online": {"session": 300.0, "gap": 200.0, "spread": 0.5}}
SCENARIO = {"partition": {"name": "client-heterogeneity", "clients": 12, "alpha": 1.0}}


def asynchronous(states=ONLINE, **run):
    options = {"mode": "async", "rounds": 12, "cohort": 5, "buffer": 3, **run}
    return {"scenario": {**SCENARIO, "devices": {**PHONES, "states": states}}, "run": options}


def start(change=None, **sections):
    table = {**BASE, **asynchronous(), **(change or {}), **sections}
    prepared = prepare(Experiment.from_dict(table), "cpu")
    made = prepared.group(0, journals=None, device="cpu", workers=1)
    made.start()
    return made, prepared


def finish(made):
    while not made.done:
        made.step()
    found = made.drain().to_pylist()
    for row in found:
        row.pop("selection_seconds")
    return found


class OneByOne:
    """The same run, with a queue of events and one client trained at a time, from the journal's own choices."""

    def __init__(self, made, prepared, plain_client):
        self.run, self.made, self.prepared, self.plain = made.runs[0], made, prepared, plain_client
        self.cohorts = {row.ticket: row for row in self.run.session.journal.cohorts()}

    def models(self, rule, buffer, count):
        """Return the global models one after the other, and when each came."""
        plan, devices = self.run.plan, self.run.plan.scenario.devices
        model = self.made.engine.init(plan.seed)
        queue, ticket, clock, waiting, found = [], 0, 0.0, [], []
        on, given = np.zeros(12, bool), []
        while len(found) < count:
            on = devices.presence(np.arange(12), seed=plan.seed, time=clock).on.copy()
            on[[client for *_, client, _ in queue]] = False
            while len(queue) < 5 and len(waiting) < buffer:
                online = int(on.sum()) + len(queue)
                newest = given[max(len(given) - online + 1, 0) :]
                if not any(newest.count(c) < 2 for c in np.flatnonzero(on)):
                    break  # the place waits
                row = self.cohorts[ticket]
                (client,) = row.clients.tolist()
                assert on[client] and row.round == len(found) and newest.count(client) < 2
                on[client] = False
                samples = self.run.steps[client] * min(7, self.run.federation.train_sizes[client])
                bytes_ = 2 * 4 * self.made.engine.n_params
                need = devices.durations(np.array([client]), samples, bytes_, seed=plan.seed)
                (seconds,), (status,) = devices.work(np.array([client]), need, seed=plan.seed, time=clock)
                heapq.heappush(queue, (clock + seconds, ticket, status, client, (len(found), model)))
                ticket += 1
            if len(waiting) == buffer:
                model = rule(model, waiting, len(found))
                found.append((clock, model))
                waiting = []
                continue
            later = devices.presence(np.arange(12), seed=plan.seed, time=clock).until.min()
            if len(queue) < 5 and (not queue or later < queue[0][0]):
                clock = float(later)
                continue
            clock, mine, status, client, (version, begun) = heapq.heappop(queue)
            if status == Status.OK:
                seed = int(streams.stream(plan.seed, "flow", mine).integers(1 << 62))
                trained = self.plain(self.prepared, client).train(begun, plan.local, seed, version)
                waiting.append((client, version, begun, trained))
                given.append(client)
        return found


def fedbuff(old, waiting, now):
    step = sum((trained - begun) / (1 + now - version) ** 0.5 for _, version, begun, trained in waiting)
    return old + step / len(waiting)


def fedasync(old, waiting, now):
    for _, version, _, trained in waiting:
        alpha = 0.6 * (1 + now - version) ** -0.5
        old = (1 - alpha) * old + alpha * trained
    return old


@pytest.mark.parametrize(("name", "rule", "buffer"), [("fedbuff", fedbuff, 3), ("fedasync", fedasync, 1)])
@pytest.mark.parametrize("states", [None, ONLINE], ids=["always on", "sessions"])
def test_models_are_those_of_one_client_after_the_other(name, rule, buffer, states, plain_client):
    made, prepared = start(asynchronous(states, buffer=buffer), aggregator={"name": name})
    (run,) = made.runs
    clocks, models = [], []
    while not made.done:
        made.step()
        clocks.append(run.clock)
        models.append(made.models[run.row].clone())
    staleness = [r.metrics["staleness"] for t in range(20) for r in run.session.journal.replies(t) if r.status == 0]
    assert max(staleness) > 0
    for (clock, model), ours, at in zip(
        OneByOne(made, prepared, plain_client).models(rule, buffer, 12), models, clocks, strict=True
    ):
        assert at == pytest.approx(clock, rel=1e-9)
        torch.testing.assert_close(ours, model, rtol=1e-4, atol=1e-5)
    made.close()


@pytest.mark.parametrize("buffer", [1, 5])
@pytest.mark.parametrize("selector", ["uniform", "balanced"])
def test_one_fast_client_does_not_own_the_model(selector, buffer, tmp_path):
    """Ten clients at work, of which one answers 600 times as fast as the others."""
    (tmp_path / "on.csv").write_text("client,from,to,state\n" + "".join(f"{i},0,1000000,on\n" for i in range(10)))
    speeds = [60000.0] + [100.0] * 9
    rows = "".join(f"{i},{speed},1e12\n" for i, speed in enumerate(speeds))
    (tmp_path / "speeds.csv").write_text("client,speed,bandwidth\n" + rows)
    devices = {"name": "trace", "path": str(tmp_path / "on.csv"), "speeds_path": str(tmp_path / "speeds.csv")}
    scenario = {"partition": {"name": "iid", "clients": 10}, "devices": {**devices, "shuffle": False}}
    change = {"selectors": {selector: {}}, "scenario": scenario}
    shares = []
    for most in (2, 1000):
        run = {"mode": "async", "rounds": 100 // buffer, "cohort": 10, "buffer": buffer, "max_answers": most}
        made, _ = start({**change, "run": run})
        finish(made)
        journal = made.runs[0].session.journal
        clients = {row.ticket: int(row.clients[0]) for row in journal.cohorts() if len(row.clients)}
        used = [clients[ticket] for body in journal.events("new-model") for ticket in body["tickets"]]
        assert len(used) == 100
        shares.append(used.count(0))
        if most == 2:
            assert all(used[i : i + 10].count(c) <= 2 for i in range(91) for c in range(10))
            assert journal.events("wait")[0]["clients"] == ["0"]
        made.close()
    # Without the limit, whoever just answered is the only candidate. `balanced` has its own: S times an even draw.
    assert shares[0] <= 20 and (shares[1] == 100 if selector == "uniform" else 20 < shares[1] <= 46)


@pytest.mark.parametrize("name", ["fedvarp", "mifa"])
def test_the_newest_update_of_each_client_is_remembered_at_its_own_learning_rate(name, plain_client):
    """Eight answers a model from five places of twelve clients: some clients answer twice."""
    local = {**BASE["local"], "lr_decay": 0.9}
    made, prepared = start(asynchronous(None, buffer=8, rounds=8), aggregator={"name": name}, local=local)
    (run,) = made.runs
    remembered, twice, stale = {}, 0, 0

    def rule(old, waiting, now):
        nonlocal twice, stale
        fresh = [
            (client, (trained - begun) / run.plan.local.lr_at(version)) for client, version, begun, trained in waiting
        ]
        twice += len(fresh) - len(dict(fresh))
        stale += sum(version < now for _, version, *_ in waiting)
        zero = torch.zeros_like(old)
        before = sum(remembered.values(), zero) / 12
        change = sum((update - remembered.get(client, zero) for client, update in fresh), zero) / len(fresh)
        remembered.update(fresh)
        direction = before + change if name == "fedvarp" else sum(remembered.values(), zero) / 12
        return old + run.plan.local.lr_at(now) * direction

    models = []
    while not made.done:
        made.step()
        models.append(made.models[run.row].clone())
    for (_, model), ours in zip(OneByOne(made, prepared, plain_client).models(rule, 8, 8), models, strict=True):
        torch.testing.assert_close(ours, model, rtol=1e-4, atol=1e-5)
    assert twice > 5 and stale > 5
    made.close()


def test_a_run_is_the_same_bit_by_bit_whoever_shares_its_batch():
    selectors = {"uniform": {}, "balanced": {}, "power-of-choice": {}, "active-fl": {}}
    together, _ = start(seeds=[1, 2], selectors=selectors)
    everything = finish(together)
    for label in selectors:
        alone, _ = start(seeds=[2], selectors={label: {}})
        mine = finish(alone)
        assert mine == [row for row in everything if row["run"] == f"{label}-s2"]
        alone.close()
    together.close()


@pytest.mark.parametrize("run", [{}, {"buffer": 1}, {"period": 40.0}])
def test_it_continues_after_any_model(tmp_path, run):
    change = {**asynchronous(**run), "selectors": {"balanced": {}, "power-of-choice": {}}}
    whole, prepared = start(change)
    expected = finish(whole)
    for stop in (1, 5):
        home = tmp_path / str(stop)
        home.mkdir()
        cut = prepared.group(0, journals=home, device="cpu", workers=1)
        cut.start()
        for _ in range(stop):
            cut.step()
        cut.commit()
        saved, found = cut.checkpoint().to_bytes(), cut.drain().to_pylist()
        cut.step()  # goes on, and is killed
        cut.commit()
        cut.close()
        again = prepared.group(0, journals=home, device="cpu", workers=1)
        again.begin(saved)
        rest = finish(again)
        for row in found:
            row.pop("selection_seconds")
        key = lambda row: (row["round"], row["run"])  # noqa: E731
        assert sorted(found + rest, key=key) == sorted(expected, key=key)
        assert torch.equal(again.models, whole.models)
        again.close()
    whole.close()


def test_questions_are_paid_for():
    made, _ = start(selectors={"uniform": {}, "power-of-choice": {"d": 4}})
    rows = finish(made)
    assert {row["asked"] for row in rows if row["run"] == "uniform-s1"} == {0}
    asking = [row for row in rows if row["run"] == "power-of-choice-s1"]
    begun = sum(len(row["durations"]) for row in asking)
    asked = sum(row["asked"] for row in asking)
    assert begun < asked <= 4 * begun  # fewer than four may be on and free
    assert sum(row["query_bytes_down"] for row in asking) == asked * 4 * made.engine.n_params
    made.close()


def test_models_at_fixed_times():
    made, _ = start(asynchronous(None, period=40.0))
    clocks = [row["clock"] for row in finish(made)]
    assert all(clock % 40 == pytest.approx(0, abs=1e-6) for clock in clocks) and len(clocks) == 12
    made.close()


def test_latencies_of_rounds_work_as_well():
    scenario = {**SCENARIO, "latency": {"name": "shifted-exponential", "straggling": 10.0}, "failure": 0.2}
    made, _ = start({"scenario": scenario})
    assert finish(made)[-1]["clock"] > 0
    statuses = [r.status for t in range(20) for r in made.runs[0].session.journal.replies(t)]
    assert Status.FAILED in statuses
    made.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"selectors": {"oort": {}}}, "cannot choose one client at a time"),
        ({"aggregator": {"name": "scaffold"}}, "'scaffold' changes local training"),
        ({"filter": {"name": "cmfl"}}, "judges the models of a round"),
        ({"run": {"mode": "async", "cohort": "all"}}, "run.cohort is"),
        ({"run": {"mode": "async", "cohort": 3, "spares": 2}}, "run.spares belong to rounds"),
        ({"scenario": {**SCENARIO, "deadline": 3.0}}, "deadline closes rounds"),
        ({"scenario": {**SCENARIO, "availability": "day-night"}}, "a function of the round"),
    ],
)
def test_parts_that_know_rounds_only_are_refused(change, words):
    with pytest.raises(FedcohortError, match=words):
        prepare(Experiment.from_dict({**BASE, **asynchronous(), **change}), "cpu")


def test_a_run_ends_where_nobody_ever_comes(tmp_path):
    from fedcohort.scenario.traces import Trace, write_trace

    write_trace(Trace.of([("0", 0.0, 1.0, "a"), ("0", 1.0, 2.0, "a"), ("1", 5.0, 6.0, "b"), ("1", 5.5, 6.0, "a")]),
                tmp_path / "t.csv")  # fmt: skip
    devices = {"name": "trace", "path": str(tmp_path / "t.csv"), "shuffle": False}
    scenario = {"partition": {"name": "iid", "clients": 1}, "devices": devices}
    made, _ = start({"scenario": scenario, "run": {"mode": "async", "cohort": 1, "rounds": 5}})
    made.step()
    assert made.runs[0].state == "stopped" and "no client is online" in made.runs[0].reason
    made.close()


def test_places_stay_free_where_the_rules_admit_nobody():
    made, _ = start(asynchronous(None), rules={"blocked": [str(i) for i in range(9)]})
    rows = finish(made)
    journal = made.runs[0].session.journal
    chosen = [row.clients.tolist() for row in journal.cohorts()]
    assert len(rows) == 12 and all(len(cohort) == 1 and cohort[0] >= 9 for cohort in chosen)
    made.close()


def test_a_run_ends_where_the_rules_admit_nobody_any_more():
    run = {"rounds": 4, "cohort": 1, "buffer": 5}
    made, _ = start(asynchronous(None, **run), rules={"max_participations": 1})  # 12 clients, 20 answers
    rows = finish(made)
    assert len(rows) == 2 and made.runs[0].state == "stopped"
    assert "the rules admit nobody" in made.runs[0].reason
    made.close()


def test_an_experiment_in_both_modes(tmp_path):
    """A directory with a setting of each mode: rows, clients, leaderboards, resume and report read it."""
    table = {**BASE, **asynchronous(rounds=8), "selectors": {"uniform": {}, "balanced": {}}}
    table["run"] = {**table["run"], "checkpoint_seconds": 0.0, "shadows": ["uniform"]}
    table["settings"] = [{"name": "async"}, {"name": "sync", "run": {"mode": "sync"}}]
    assert run_experiment(table, tmp_path / "whole", device="cpu") == "finished"
    results = load(tmp_path / "whole")
    for run in results.runs:
        assert run.state == "finished" and results.column(run, "round").tolist() == list(range(8))
        assert (np.diff(results.column(run, "clock")) >= 0).all()
        members = results.members(run)
        assert set(members["status"].tolist()) <= {int(s) for s in Status} and len(members["client"]) > 15
    assert len(results.leaderboards()) == 2
    simulation = Simulation(Experiment.from_dict(table), tmp_path / "cut", device="cpu")
    simulation.listeners = [_StopAfter(simulation, 11)]
    assert simulation.run() == "interrupted"
    assert Simulation.open(tmp_path / "cut", device="cpu").run() == "finished"
    again = load(tmp_path / "cut")
    for run in results.runs:
        for column in ("accuracy", "clock", "bytes_up"):
            assert results.column(run, column).tolist() == again.column(run.id, column).tolist()
        assert [c.tolist() for c in results.cohorts(run)] == [c.tolist() for c in again.cohorts(run.id)]


def test_the_weights_of_clients_are_those_of_the_models_they_are_in(tmp_path):
    """FedBuff's, (1 + staleness)^-1/2 over three, by the journal's own record of answers and models."""
    table = {**BASE, **asynchronous(rounds=10), "aggregator": {"name": "fedbuff"}}
    assert run_experiment(table, tmp_path / "out", device="cpu") == "finished"
    results = load(tmp_path / "out")
    (run,) = results.runs
    members = results.members(run)
    with closing(read_journal(results.journal(run))) as record:
        begun = {row.ticket: row for row in record.cohorts()}
        used = {t: body["round"] for body in record.events("new-model") for t in body["tickets"]}
    there = set(members["round"].tolist())  # not those of which nobody has answered
    tickets = sorted((t for t in begun if begun[t].round in there), key=lambda t: (begun[t].round, t))
    assert len(used) == 30 and used.keys() <= set(tickets)
    for ticket, weight in zip(tickets, members["weight"].tolist(), strict=True):
        if ticket in used:
            assert weight == pytest.approx((1 + used[ticket] - begun[ticket].round) ** -0.5 / 3, rel=1e-6)
        else:
            assert np.isnan(weight)


class _StopAfter:
    def __init__(self, simulation, rounds):
        self.simulation, self.left = simulation, rounds

    def on_start(self, runs, done, total):
        pass

    def on_round(self, run, row):
        self.left -= 1
        if self.left == 0:
            self.simulation.stop()

    def on_end(self, state):
        pass


def test_a_group_of_rounds_is_not_asked_for_a_flow():
    made, _ = group()
    with pytest.raises(InputError):
        made.runs[0].session.advance()
    made.close()


HALF = """
import dataclasses
import numpy as np
from fedcohort import Cohort
from fedcohort.selectors import Uniform


@dataclasses.dataclass(frozen=True, kw_only=True)
class Half(Uniform):
    def select(self, state, slate, answer, rng):
        cohort, state = super().select(state, slate, answer, rng)
        return dataclasses.replace(cohort, work=np.full(len(cohort), 0.5)), state
"""


@pytest.mark.parametrize(("usual", "steps"), [(1, 1), (5, 3), (7, 4)])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_half_the_work_is_the_same_number_of_steps_in_rounds_and_without(mode, usual, steps, tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(HALF)
    monkeypatch.chdir(tmp_path)
    change = asynchronous(mode=mode, rounds=2) if mode == "async" else {"run": {"rounds": 2, "cohort": 5}}
    local = {"steps": usual, "batch_size": 8}
    made, _ = start(change, selectors={"half": {"name": "own.py:Half"}}, local=local)
    seen = []
    train = made.engine.train
    monkeypatch.setattr(made.engine, "train", lambda *a, **k: (seen.append(a[1].steps), train(*a, **k))[1])
    finish(made)
    assert set(np.concatenate(seen).tolist()) == {steps}
