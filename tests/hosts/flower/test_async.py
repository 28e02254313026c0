"""Flower without rounds: the simulator's dispatches, the aggregators' models, kills, and clients that misbehave."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedMedian,
    FedXgbBagging,
)
from typer.testing import CliRunner

from fedcohort.cli.app import app as cli
from fedcohort.core.errors import InputError, ParameterError
from fedcohort.core.protocol import SELECTORS, Status
from fedcohort.core.signals import Signal
from fedcohort.hosts import Policy, live_run
from fedcohort.hosts.flow import batch_seed
from fedcohort.hosts.flower import (
    Answers,
    AsyncCohortStrategy,
    CohortStrategy,
    Facts,
    FederationTimeoutError,
    RoundError,
    cohort_client,
    corrections,
    failures,
)
from fedcohort.hosts.flower.checkpoint import AnswerFiles, Checkpoints
from fedcohort.hosts.live_run import record_end
from fedcohort.journal import read_journal
from fedcohort.report.account import read_account
from fedcohort.session.rules import Rules
from fedcohort.session.session import Session
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.rounds.prepare import prepare
from fedcohort.training.aggregators import FedAsync, FedBuff, Members, Mix, WeightedSum
from tests.experiments import run_experiment

from .conftest import ANSWERS, Clock, FakeGrid, Fleet, Node, client_app, model, step, with_policy
from .test_parity import imported, run_in_process, write_app

SEED = 3
ONE_BY_ONE = [name for name in SELECTORS if SELECTORS.get(name).one_at_a_time]
TABLE: Mapping[str, Any] = {
    "seeds": [SEED],
    "data": {"name": "synthetic", "samples": 400, "test_samples": 40, "classes": 4, "shape": [6]},
    "scenario": {
        "partition": {"name": "client-heterogeneity", "clients": 20, "alpha": 0.5},
        "latency": {"name": "shifted-exponential", "straggling": 10.0},
        "failure": 0.1,
    },
    "model": {"name": "mlp-64"},
    "local": {"batch_size": 32, "steps": 1, "lr": 0.1},
}


class PowerCut(BaseException):
    pass


def quiet(session: Any, state: str, reason: str = "") -> None:
    """Record the end of a run, but not that of a killed process."""
    if state != "failed":
        record_end(session, state, reason)


def asynchronous(fleet: Fleet, *arguments: Any, **settings: Any) -> AsyncCohortStrategy:
    made = AsyncCohortStrategy(*arguments, **{"seed": SEED, **with_policy(settings)})
    made.clock, made.sleep = fleet.clock, fleet.clock.sleep
    return made


def dispatches(journal: Path) -> list[tuple[int, int, int]]:
    """Return ticket, client and model of every dispatch."""
    with closing(read_journal(journal)) as record:
        return [(row.ticket, int(row.clients[0]), row.round) for row in record.cohorts()]


def arrivals(journal: Path) -> list[tuple[int, Status]]:
    """Return tickets in the order in which they were answered, with what came."""
    with closing(read_journal(journal)) as record:
        order = [ticket for (ticket,) in record.database.fetch("SELECT ticket FROM replies ORDER BY id")]
        status = {reply.ticket: reply.status for reply in record.replies()}
    return [(ticket, Status(status[ticket])) for ticket in order]


class ScriptedGrid(FakeGrid):
    """A grid whose clients answer in a given order of tickets, some of them with an error."""

    def __init__(self, clock: Clock, script: Iterable[tuple[int, Status]]) -> None:
        super().__init__(clock)
        self.script = list(script)
        self.tickets = {batch_seed(SEED, ticket): ticket for ticket in range(5000)}

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        train = {}
        others = []
        for message_id in message_ids:
            message = self._sent[message_id].message
            if message.metadata.message_type == "train":
                train[self.tickets[message.content["config"]["fedcohort.seed"]]] = message_id
            else:
                others.append(message_id)
        found = list(super().pull_messages(others))
        if train and self.script:
            ticket, status = self.script.pop(0)
            sent = self._sent.pop(train[ticket])
            failed = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "scripted")
            found.append(self._work(sent) if status is Status.OK else Message(failed, reply_to=sent.message))
        return found


# -- the simulator's dispatches ---------------------------------------------------------------------------------------


def simulate(folder: Path, selectors: list[str], models: int, **run: Any) -> Any:
    """Run selectors asynchronously in the simulator; return the group, closed."""
    table = {
        **TABLE,
        "selectors": {name: {} for name in selectors},
        "run": {"mode": "async", "rounds": models, "cohort": 6, "buffer": 3, "eval_every": models, **run},
    }
    prepared = prepare(Experiment.from_dict(table), "cpu")
    folder.mkdir(parents=True)
    group = prepared.group(0, journals=folder, device="cpu", workers=1)
    group.start()
    while not group.done:
        group.step()
    group.commit()
    group.close()
    return group


def live(group: Any, journal: Path, name: str, models: int, **settings: Any) -> list[tuple[int, int, int]]:
    """Play the arrivals of a simulated run to clients that declare what its clients hold; return the dispatches."""
    table = group.runs[0].table
    clock = Clock()
    grid = ScriptedGrid(clock, arrivals(journal))
    for client in range(table.n):
        size, counts = int(table.sizes[client]), table.label_counts[client].tolist()
        answers = Answers(facts=lambda _, s=size, c=counts: Facts(size=s, label_counts=c))
        app = cohort_client(client_app(), answers)
        grid.add(Node(app, {"client-name": f"client-{client}", "partition-id": client}), node_id=500 - client)
    strategy = asynchronous(
        Fleet(clock), name, FedAvg(fraction_evaluate=0.0), busy=6, buffer=3, wait_for=table.n, **settings
    )
    strategy.start(grid, model(counter=False), num_rounds=models)
    assert not grid.script
    return sent(grid, lambda node: 500 - node)


def sent(grid: ScriptedGrid, client: Any) -> list[tuple[int, int, int]]:
    """Return ticket, client and model of every train message."""
    configs = [(m.metadata.dst_node_id, m.content["config"]) for m in grid.log if m.metadata.message_type == "train"]
    return [(grid.tickets[c["fedcohort.seed"]], client(node), c["server-round"] - 1) for node, c in configs]


@pytest.mark.parametrize(
    "name",
    [pytest.param("uniform", marks=pytest.mark.slow), "balanced", pytest.param("fedcbs", marks=pytest.mark.slow)],
)
def test_a_thousand_dispatches_are_the_simulators(name: str, tmp_path: Path) -> None:
    models = 310
    group = simulate(tmp_path / "simulated", [name], models)
    journal = tmp_path / "simulated" / f"{name}-s{SEED}.sqlite"
    ours = dispatches(journal)
    assert len(ours) > 1000 and max(version for *_, version in ours) == models - 1
    assert sum(status is Status.FAILED for _, status in arrivals(journal)) > 50
    assert live(group, journal, name, models) == ours


def test_models_at_fixed_times_are_made_of_what_has_come(tmp_path: Path) -> None:
    fleet = Fleet()
    for number in range(6):
        fleet.grid.add(fleet.node(number, latency=2.0 + number))
    strategy = asynchronous(
        fleet, "uniform", FedAvg(fraction_evaluate=0.0), busy=3, period=10.0, journal=tmp_path / "j"
    )
    strategy.start(fleet.grid, model(), num_rounds=8)
    assert 80.0 <= fleet.clock.now < 83.0
    with closing(read_journal(tmp_path / "j")) as record:
        used = [body["tickets"] for body in record.events("new-model")]
    assert len(used) == 8 and len(set(map(len, used))) > 1


TRAINED = [
    name
    for name in ONE_BY_ONE
    if name not in ("uniform", "balanced", "fedcbs")  # above
    and Signal.DURATION not in SELECTORS.create(name).requires  # real clients take their own time
]


@pytest.mark.parametrize("name", TRAINED)
def test_selectors_that_learn_from_training_dispatch_alike(name: str, tmp_path: Path) -> None:
    """The app of `fedcohort flower new` trains the simulator's models on the simulator's batches."""
    models = 12
    table = {
        **TABLE,
        "data": {**TABLE["data"], "classes": 10},  # as many as the app's clients tell
        "scenario": {**TABLE["scenario"], "partition": {"name": "dirichlet", "clients": 8, "alpha": 0.5}},
        "selectors": {name: {}},
        "aggregator": {"name": "fedbuff"},
        "run": {"mode": "async", "rounds": models, "cohort": 4, "buffer": 2},
    }
    run_experiment(table, tmp_path / "out")
    journal = tmp_path / "out" / "journal" / f"{name}-s{SEED}.sqlite"
    grid = ScriptedGrid(Clock(), arrivals(journal))
    folder = write_app(tmp_path / "app", table, "async-app", asynchronous=True)
    with imported(folder, "async_app") as app:
        run_in_process(app, grid, name, tmp_path / "live")
    ours = dispatches(journal)
    assert sent(grid, lambda node: 900 - node) == ours and len(ours) > 2 * models
    live = tmp_path / "live" / f"{name}.sqlite"
    assert dispatches(live) == ours
    found = []
    for each in (journal, live):
        with closing(read_journal(each)) as record:
            found.append([numbers["loss"] for _, numbers in sorted(record.metrics().items())])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-3)


# -- the aggregators' models ------------------------------------------------------------------------------------------


def brute_force(journal: Path, aggregator: str) -> list[float]:
    """Return the bias of every model, from the definitions and the journal's own order of events.

    Client k adds k + 1 to the model it was sent, and has 10 (k + 1) samples.
    """
    versions = {ticket: (client, version) for ticket, client, version in dispatches(journal)}
    with closing(read_journal(journal)) as record:
        used = [body["tickets"] for body in record.events("new-model")]
    models = [0.0]
    for tickets in used:
        now, parts = models[-1], []
        for client, version in (versions[ticket] for ticket in tickets):
            stale = len(models) - 1 - version
            parts.append((client + 1.0, (1 + stale) ** -0.5, models[version] + client + 1))
        if aggregator == "fedbuff":
            now += sum(update * discount for update, discount, _ in parts) / len(parts)
        elif aggregator == "fedavg-stale":
            weights = [10 * update * discount for update, discount, _ in parts]
            now += sum(w * update for w, (update, _, _) in zip(weights, parts, strict=True)) / sum(weights)
        else:
            for _, discount, own in parts:
                now = (1 - 0.6 * discount) * now + 0.6 * discount * own
        models.append(now)
    return models


def numbered(count: int, fleet: Fleet, app: Any = None) -> Fleet:
    for number in range(count):
        fleet.grid.add(fleet.node(number, app, latency=1.0 + 0.7 * number))
    return fleet


@pytest.mark.parametrize("aggregator", ["fedbuff", "fedasync", "fedavg-stale"])
@pytest.mark.parametrize("buffer", [1, 3])
def test_models_are_the_aggregators(aggregator: str, buffer: int, tmp_path: Path) -> None:
    fleet = numbered(7, Fleet())
    found: list[float] = []

    def evaluate(_: int, arrays: ArrayRecord) -> MetricRecord:
        found.append(float(arrays["bias"].numpy()[0]))
        return MetricRecord({"bias": found[-1]})

    strategy = asynchronous(
        fleet, "uniform", FedAvg(fraction_evaluate=0.0), busy=5, buffer=buffer, aggregator=aggregator,
        journal=tmp_path / "j",
    )  # fmt: skip
    strategy.start(fleet.grid, model(), num_rounds=20, evaluate_fn=evaluate)
    with closing(read_journal(tmp_path / "j")) as record:
        staleness = [reply.metrics["staleness"] for reply in record.replies()]
    assert max(staleness) > 1
    np.testing.assert_allclose(found, brute_force(tmp_path / "j", aggregator), rtol=1e-5)


def test_an_optimiser_of_flower_steps_from_the_newest_model() -> None:
    """FedAdam remembers the model it configured last; without momentum its first step is eta times a sign."""
    fleet = numbered(6, Fleet())
    found: list[float] = []

    def evaluate(_: int, arrays: ArrayRecord) -> None:
        found.append(float(arrays["bias"].numpy()[0]))

    inner = FedAdam(fraction_evaluate=0.0, eta=1.0, beta_1=0.0, beta_2=0.0, tau=1e-9)
    asynchronous(fleet, "uniform", inner, busy=4, buffer=2).start(
        fleet.grid, model(counter=False), num_rounds=6, evaluate_fn=evaluate
    )
    np.testing.assert_allclose(np.diff(found), 1.0, rtol=1e-4)


def test_robust_strategies_see_updates_on_top_of_the_newest_model() -> None:
    fleet = Fleet()
    fleet.fill(5)
    result = asynchronous(fleet, "uniform", FedMedian(fraction_evaluate=0.0), busy=5, buffer=5).start(
        fleet.grid, model(counter=False), num_rounds=1
    )
    assert float(result.arrays["bias"].numpy()[0]) == pytest.approx(3.0)  # of 1 to 5


# -- kills ------------------------------------------------------------------------------------------------------------


EVENTS = (
    (Session, "commit"),
    (AnswerFiles, "save"),
    (Checkpoints, "save"),
    (FakeGrid, "push_messages"),
    (ScriptedGrid, "pull_messages"),
)
_COUNT = 9  # clients


def cut_before_and_after_events(monkeypatch: pytest.MonkeyPatch, step_on: Callable[[str], None]) -> None:
    """Call ``step_on`` with the name of each event, before and after it."""

    def unreliable(owner: Any, name: str) -> None:
        whole = getattr(owner, name)

        def cut(*arguments: Any, **options: Any) -> Any:
            step_on(f"before {owner.__name__}.{name}")
            found = whole(*arguments, **options)
            step_on(f"after {owner.__name__}.{name}")
            return found

        monkeypatch.setattr(owner, name, cut)

    for owner, name in EVENTS:
        unreliable(owner, name)
    monkeypatch.setattr(live_run, "record_end", quiet)


def play_script(journal: Path, script: list[tuple[int, Status]], models: int) -> Any:
    clock = Clock()
    grid = ScriptedGrid(clock, script)
    for number in range(_COUNT):
        app = cohort_client(client_app(), ANSWERS)
        grid.add(Node(app, {"client-name": f"client-{number}", "partition-id": number}))
    inner = FedAdam(fraction_evaluate=0.0, eta=0.3)
    strategy = asynchronous(Fleet(clock), "balanced", inner, busy=4, buffer=3, journal=journal, wait_for=_COUNT)
    return strategy.start(grid, model(), num_rounds=models).arrays


def script_of(models: int, seed: int) -> list[tuple[int, Status]]:
    """Return tickets in the order of their answers; the next ticket takes the place of the one that answers."""
    draw = np.random.default_rng(seed)
    at_work, script, following = list(range(4)), [], 4
    while len(script) < 4 * models:
        ticket = at_work.pop(int(draw.integers(len(at_work))))
        script.append((ticket, Status.FAILED if draw.random() < 0.15 else Status.OK))
        at_work.append(following)
        following += 1
    return script


def assert_nothing_changed(folder: Path, whole: Any, killed: Any) -> None:
    assert dispatches(folder / "cut") == dispatches(folder / "whole")
    for key, array in whole.items():
        assert np.array_equal(array.numpy(), killed[key].numpy()), key
    files = folder / "cut.checkpoints"
    assert not list(files.glob("answer-*")) and len(list(files.glob("after-*"))) <= 2 + 4


def test_a_kill_anywhere_changes_no_dispatch_and_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted before and after each message, file and commit, with nodes that come back under other ids."""
    models, left = 24, [10**9]  # steps until the power cut

    def step_on(event: str) -> None:
        left[0] -= 1
        if left[0] <= 0:
            left[0] = 10**9
            raise PowerCut

    cut_before_and_after_events(monkeypatch, step_on)
    draw, script = np.random.default_rng(1), script_of(models, seed=1)
    whole = play_script(tmp_path / "whole", list(script), models)
    kills = 0
    killed = None
    while killed is None:
        done = len(arrivals(tmp_path / "cut")) if (tmp_path / "cut").exists() else 0
        left[0] = int(draw.integers(1, 60))
        try:
            killed = play_script(tmp_path / "cut", script[done:], models)
        except PowerCut:
            kills += 1
    print(f"cut off {kills} times, {len(dispatches(tmp_path / 'cut'))} dispatches")
    assert kills > 20
    assert_nothing_changed(tmp_path, whole, killed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "event", [f"{at} {owner.__name__}.{name}" for owner, name in EVENTS for at in ("before", "after")]
)
@pytest.mark.parametrize("seed", range(4))
def test_a_kill_at_every_kind_of_event(event: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty runs: each is cut off at one kind of event, again and again, the first time at its n-th occurrence."""
    models, draw = 8, np.random.default_rng(seed)
    left = [10**9]

    def step_on(found: str) -> None:
        left[0] -= found == event
        if left[0] <= 0:
            left[0] = 10**9
            raise PowerCut

    cut_before_and_after_events(monkeypatch, step_on)
    script, kills, killed = script_of(models, seed), 0, None
    whole = play_script(tmp_path / "whole", list(script), models)
    while killed is None:
        done = len(arrivals(tmp_path / "cut")) if (tmp_path / "cut").exists() else 0
        # Not always the first event, before which a start may do nothing that lasts.
        left[0] = int(draw.integers(2, 9))
        try:
            killed = play_script(tmp_path / "cut", script[done:], models)
        except PowerCut:
            kills += 1
            assert kills < 200, "the run makes no progress"
    print(f"{event}: cut off {kills} times")
    assert kills
    assert_nothing_changed(tmp_path, whole, killed)


def test_a_finished_run_says_so_and_goes_on_with_more_models(tmp_path: Path) -> None:
    def play(models: int) -> Fleet:
        fleet = numbered(5, Fleet())
        asynchronous(fleet, "uniform", FedAvg(fraction_evaluate=0.0), busy=2, journal=tmp_path / "j").start(
            fleet.grid, model(), num_rounds=models
        )
        return fleet

    play(5)
    assert not play(5).trained()
    assert play(7).trained()
    with Session.open(tmp_path / "j") as session:
        assert session.round == 7 and session.asynchronous


def test_what_was_live_is_explained_audited_and_verified(tmp_path: Path) -> None:
    fleet = numbered(6, Fleet())
    strategy = asynchronous(
        fleet, "balanced", FedAvg(fraction_evaluate=0.0), busy=3, buffer=2, journal=tmp_path / "j.sqlite", audit=True,
        shadows={"uniform": "uniform"},
    )  # fmt: skip
    strategy.start(fleet.grid, model(), num_rounds=8)
    found = read_account(tmp_path / "j.sqlite")
    assert found.done == 8 and found.planned == 8 and found.state == "finished"
    for command, words in (
        (["explain"], "8 of 8 models, finished"),
        (["explain", "--round", "3"], "shadow uniform would have picked"),
        (["journal", "verify"], "nothing is wrong"),
        (["journal", "audit"], "confirmed"),
    ):
        place = [*command[:1], str(tmp_path / "j.sqlite"), *command[1:]]
        if command[0] == "journal":
            place = [*command, str(tmp_path / "j.sqlite")]
        done = CliRunner().invoke(cli, place)
        assert done.exit_code == 0 and words in done.output, done.output


def test_a_journal_of_rounds_is_not_continued_without(tmp_path: Path) -> None:
    fleet = numbered(4, Fleet())
    fleet.strategy("uniform", FedAvg(fraction_evaluate=0.0), journal=tmp_path / "j", cohort_size=2, seed=SEED).start(
        fleet.grid, model(), num_rounds=1
    )
    with pytest.raises(InputError, match="in rounds"):
        asynchronous(fleet, "uniform", busy=2, journal=tmp_path / "j").start(fleet.grid, model(), num_rounds=2)


# -- clients that misbehave -------------------------------------------------------------------------------------------


def broken(kind: str) -> Any:
    def train(message: Message, context: Context) -> RecordDict:
        found = step(message, context)
        if kind == "raises":
            raise ValueError("no data")
        if kind == "nan":
            found["arrays"]["bias"] = Array(np.full(3, np.nan, np.float32))
        if kind == "shape":
            found["arrays"]["bias"] = Array(np.zeros(4, np.float32))
        if kind == "weight":
            found["metrics"]["num-examples"] = -1
        return found

    return train


@pytest.mark.parametrize("kind", ["raises", "nan", "shape", "weight"])
@pytest.mark.parametrize("busy", [1, 4])
def test_a_bad_client_frees_its_place(kind: str, busy: int, tmp_path: Path) -> None:
    """Even one with the largest loss, while nobody else is at work."""
    fleet = numbered(5, Fleet())
    answers = Answers(facts=ANSWERS.facts, losses=lambda *_: {"loss": 1e6}, signals=ANSWERS.signals)
    fleet.grid.add(fleet.node(5, cohort_client(client_app(broken(kind)), answers), latency=0.1))
    strategy = asynchronous(
        fleet, "power-of-choice", FedAvg(fraction_evaluate=0.0), busy=busy, buffer=2, journal=tmp_path / "j", wait_for=6
    )
    strategy.start(fleet.grid, model(), num_rounds=6)
    bad = [failure for failure in failures(tmp_path / "j") if failure.client == "client-5"]
    expected = Status.FAILED if kind == "raises" else Status.INVALID
    assert bad and all(failure.status == expected for failure in bad)
    assert len(bad) <= 3 * 7  # three times for each model


def test_silent_nodes_lose_their_place_and_late_answers_are_on_record(tmp_path: Path) -> None:
    fleet = numbered(4, Fleet())
    fleet.grid.add(fleet.node(4, latency=25.0))
    dead = fleet.grid.add(fleet.node(5))
    fleet.clock.at.append((3.0, lambda: fleet.grid.cut(dead)))
    strategy = asynchronous(
        fleet, "balanced", FedAvg(fraction_evaluate=0.0), busy=6, buffer=4, deadline=10.0, journal=tmp_path / "j",
        wait_for=6,
    )  # fmt: skip
    strategy.start(fleet.grid, model(), num_rounds=30)
    with closing(read_journal(tmp_path / "j")) as record:
        names, status = record.table()[0].names, {}
        for reply in record.replies():
            status.setdefault(names[reply.client], []).append(Status(reply.status))
    assert status["client-4"][0] is Status.LATE and Status.OK not in status["client-4"]
    assert Status.MISSING in status["client-5"]
    assert all(set(status[f"client-{i}"]) == {Status.OK} for i in range(4))


def test_a_node_that_leaves_and_one_that_comes(tmp_path: Path) -> None:
    fleet = numbered(4, Fleet())
    leaving = fleet.grid.add(fleet.node(4, latency=50.0))
    fleet.clock.at.append((5.0, lambda: fleet.grid.remove(leaving)))
    fleet.clock.at.append((8.0, lambda: fleet.grid.add(fleet.node(9, latency=1.0)) and None))
    strategy = asynchronous(
        fleet, "balanced", FedAvg(fraction_evaluate=0.0), busy=5, buffer=2, journal=tmp_path / "j", wait_for=5
    )
    strategy.start(fleet.grid, model(), num_rounds=25)
    with closing(read_journal(tmp_path / "j")) as record:
        names = record.table()[0].names
        found = {names[reply.client]: Status(reply.status) for reply in record.replies()}
    assert found["client-4"] is Status.FAILED and found["client-9"] is Status.OK


def test_a_run_in_which_everybody_fails_ends_and_says_why() -> None:
    fleet = numbered(3, Fleet(), cohort_client(client_app(broken("raises")), ANSWERS))
    with pytest.raises(FederationTimeoutError, match=r"failed .*for 30 s"):
        asynchronous(fleet, "uniform", busy=2, patience=30.0).start(fleet.grid, model(), num_rounds=2)


def test_a_strategy_that_averages_nothing_ends_the_run() -> None:
    class Broken(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            raise ValueError("no idea")

    fleet = numbered(3, Fleet())
    with pytest.raises(RoundError, match="no idea"):
        asynchronous(fleet, "uniform", Broken(), busy=2, buffer=2).start(fleet.grid, model(), num_rounds=2)


def test_a_reply_that_only_the_strategy_refuses_is_left_out(tmp_path: Path) -> None:
    class Picky(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            replies = list(replies)
            if any(r.content["metrics"]["train-loss"] == 2.0 for r in replies):
                raise ValueError("not this one")
            return super().aggregate_train(server_round, replies)

    fleet = numbered(5, Fleet())
    asynchronous(
        fleet, "uniform", Picky(fraction_evaluate=0.0), busy=3, buffer=3, journal=tmp_path / "j"
    ).start(fleet.grid, model(), num_rounds=8)  # fmt: skip
    found = [one for one in corrections(tmp_path / "j") if "left out" in one.reason]
    assert found and all(one.client == "client-2" and "not this one" in one.reason for one in found)


@pytest.mark.parametrize("buffer", [1, 5])
@pytest.mark.parametrize("selector", ["uniform", "balanced"])
def test_one_fast_client_does_not_own_the_model(selector: str, buffer: int, tmp_path: Path) -> None:
    """It answers in 0.1 s, nine others in 60 s; the journal says when a place waited for one of them."""
    fleet = Fleet()
    for number in range(10):
        fleet.grid.add(fleet.node(number, latency=60.0 if number else 0.1))
    strategy = asynchronous(
        fleet, selector, FedAvg(fraction_evaluate=0.0), busy=10, buffer=buffer, journal=tmp_path / "j.sqlite",
        wait_for=10,
    )  # fmt: skip
    strategy.start(fleet.grid, model(), num_rounds=60 // buffer)
    with closing(read_journal(tmp_path / "j.sqlite")) as record:
        names, clients = record.table()[0].names, {t: client for t, client, _ in dispatches(tmp_path / "j.sqlite")}
        used = [names[clients[t]] for body in record.events("new-model") for t in body["tickets"]]
        waits = record.events("wait")
    assert len(used) == 60 and used.count("client-0") <= 12
    assert waits and all("client-0" in body["clients"] for body in waits)
    begun = {version for *_, version in dispatches(tmp_path / "j.sqlite")}
    round_ = ["--round", str(next(body["round"] for body in waits if body["round"] in begun))]
    for command, words in (([], "newest answers: client-0"), (round_, "a place waited: client-0 had given enough")):
        done = CliRunner().invoke(cli, ["explain", str(tmp_path / "j.sqlite"), *command])
        assert done.exit_code == 0 and words in " ".join(done.output.split()), done.output


def hostile(message: Message, context: Context) -> RecordDict:
    """Client 0 moves every number by 1,000 and claims a large weight; the others move nothing."""
    found = step(message, context)
    number = context.node_config["partition-id"]
    sent = message.content["arrays"]
    moved = {k: a if k == "seen" else Array(a.numpy() + np.float32(0 if number else 1000)) for k, a in sent.items()}
    return (
        RecordDict({"arrays": ArrayRecord(moved), "metrics": MetricRecord({"num-examples": 10.0})}) if found else found
    )


@pytest.mark.parametrize("slow", [1.0, 60.0])
@pytest.mark.parametrize("aggregator", ["fedbuff", "fedasync", "fedavg-stale"])
@pytest.mark.parametrize("timing", [{"buffer": 4}, {"period": 5.0}])
def test_no_client_has_more_than_its_share_of_a_model(
    timing: Mapping[str, Any], aggregator: str, slow: float, tmp_path: Path
) -> None:
    fleet = Fleet()
    for number in range(6):
        app = cohort_client(client_app(hostile), ANSWERS)
        fleet.grid.add(fleet.node(number, app, latency=slow if number else 0.1))
    strategy = asynchronous(
        fleet, "uniform", FedAvg(fraction_evaluate=0.0), busy=6, max_answers=100, max_share=0.25, wait_for=6,
        aggregator=aggregator, journal=tmp_path / "j.sqlite", **timing,
    )  # fmt: skip
    result = strategy.start(fleet.grid, model(), num_rounds=5)
    assert 0 < float(result.arrays["bias"].numpy()[0]) <= 5 * 250 + 1e-3
    with closing(read_journal(tmp_path / "j.sqlite")) as record:
        clients = {ticket: client for ticket, client, _ in dispatches(tmp_path / "j.sqlite")}
        assert all(len({clients[t] for t in b["tickets"]}) >= 4 for b in record.events("new-model"))
    lowered = [one for one in corrections(tmp_path / "j.sqlite") if "0.25 of a model" in one.reason]
    assert any(one.client == "client-0" for one in lowered)


def test_a_share_that_cannot_hold_is_refused_or_waits(tmp_path: Path) -> None:
    for buffer in (1, 3):
        with pytest.raises(ParameterError, match="answers of 4 clients"):
            AsyncCohortStrategy("uniform", busy=3, buffer=buffer, policy=Policy(max_share=0.25))
    fleet = numbered(3, Fleet())
    strategy = asynchronous(fleet, "uniform", busy=3, buffer=4, max_share=0.25, patience=50.0)
    with pytest.raises(FederationTimeoutError, match="for 4 clients"):
        strategy.start(fleet.grid, model(), num_rounds=2)
    fleet = numbered(4, Fleet())
    gone = fleet.grid.node_of("client-3")
    fleet.clock.at.append((1.0, lambda: fleet.grid.remove(gone)))
    strategy = asynchronous(fleet, "uniform", busy=3, buffer=4, max_share=0.25, patience=50.0, journal=tmp_path / "j")
    with pytest.raises(FederationTimeoutError):
        strategy.start(fleet.grid, model(), num_rounds=200)
    with closing(read_journal(tmp_path / "j")) as record:
        assert len(record.cohorts()) < 100


def test_rules_names_and_leases_hold(tmp_path: Path) -> None:
    fleet = numbered(6, Fleet())
    for node, name in zip(fleet.grid.nodes.values(), "abcdef", strict=True):
        node.registered = name
    strategy = asynchronous(
        fleet, "uniform", FedAvg(fraction_evaluate=0.0), busy=2, buffer=2, journal=tmp_path / "j",
        rules=Rules(blocked=["b"], min_separation=2), registered_only=True, leases=tmp_path / "leases", audit=True,
    )  # fmt: skip
    strategy.start(fleet.grid, model(), num_rounds=10)
    with closing(read_journal(tmp_path / "j")) as record:
        names = record.table()[0].names
        by_client: dict[str, list[int]] = {}
        for row in record.cohorts():
            for client in row.clients.tolist():
                by_client.setdefault(names[client], []).append(row.round)
    assert "b" not in by_client and set(by_client) <= set("acdef")
    assert all((np.diff(rounds) >= 2).all() for rounds in by_client.values())


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "settings", "words"),
    [
        (("oort",), {}, "cannot choose one client at a time"),
        (("uniform",), {"cohort_size": 3}, "'size'"),
        (("uniform",), {"spares": 1}, "'spares'"),
        (("uniform",), {"filter": "cmfl"}, "Filters"),
        (("uniform",), {"aggregator": "scaffold"}, "must be 'fedbuff', 'fedasync' or 'fedavg-stale'"),
        (("uniform",), {"aggregator": "fedavg"}, "discounts stale models. Got 'fedavg'"),
        (("uniform",), {"busy": 0}, "FlowPolicy must be"),
        (("uniform", FedXgbBagging()), {}, "adds trees"),
        (("uniform", DifferentialPrivacyServerSideFixedClipping(FedAvg(), 0.1, 1.0, 2)), {}, "adds noise"),
    ],
)
def test_what_needs_rounds_is_refused(arguments: Any, settings: Any, words: str) -> None:
    with pytest.raises((ParameterError, InputError), match=words):
        AsyncCohortStrategy(*arguments, **{"busy": 2, **with_policy(settings)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Halving(WeightedSum):
    """Every newer model halves what an answer counts."""

    name = "halving"
    discounts_staleness = True

    def mix(self, members: Members) -> Mix:
        weights = members.share * 0.5**members.staleness
        return Mix(weights / weights.sum())


def test_aggregators_with_parameters_and_the_record_of_settings(tmp_path: Path) -> None:
    fleet = numbered(4, Fleet())
    for aggregator in (FedBuff(exponent=0.0), FedAsync(alpha=1.0, discount="constant"), Halving()):
        asynchronous(
            fleet,
            "uniform",
            FedAvg(fraction_evaluate=0.0),
            busy=2,
            aggregator=aggregator,
            journal=tmp_path / aggregator.name,
        ).start(fleet.grid, model(), num_rounds=2)
        with closing(read_journal(tmp_path / aggregator.name)) as record:
            assert record.events("settings")[-1]["aggregator"] == repr(aggregator)
    assert issubclass(AsyncCohortStrategy, CohortStrategy)


# -- real processes ---------------------------------------------------------------------------------------------------

_SERVER = """
import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from fedcohort.hosts.flower import AsyncCohortStrategy

app = ServerApp()

@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    strategy = AsyncCohortStrategy(
        "uniform", FedAvg(fraction_evaluate=0.0), busy=3, buffer=2, journal=config["journal"], seed=3,
        wait_for=config["wait-for"], deadline=40.0, patience=900.0,
    )
    strategy.start(grid, ArrayRecord([np.zeros((2, 3))]), num_rounds=config["models"])
"""
_CLIENT = """
import time
import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from fedcohort.hosts.flower.client import cohort_client

app = ClientApp()

@app.train()
def train(message: Message, context: Context) -> Message:
    (value,) = message.content["arrays"].to_numpy_ndarrays()
    if context.node_config["partition-id"] == 3:
        time.sleep(300)
    if context.node_config["partition-id"] == 2:
        raise ValueError("no data")
    reply = {"arrays": ArrayRecord([value + 1]), "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(reply), reply_to=message)

app = cohort_client(app)
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_on_a_deployment_that_is_cut_off(kit: Any, tmp_path: Path) -> None:
    """Four SuperNodes, of which one fails and one hangs; the ServerApp is killed in the middle."""
    app = kit.flower_app(tmp_path / "app", "small", _SERVER, _CLIENT, {"models": 1, "journal": "", "wait-for": 4})
    journal = tmp_path / "run.sqlite"
    with kit.Loopback(tmp_path / "home", nodes=4) as federation:
        config = {"models": 8, "journal": str(journal)}
        run = federation.start_run(app, config)
        federation.watch(run, lambda: "[MODEL 1" in run.log_file.read_text(), 900)
        assert federation.kill_serverapp()
        before = dispatches(journal)
        # The one that hangs does so for five minutes, and cannot say who it is.
        done = federation.run(app, {**config, "wait-for": 3}, timeout=900)
        assert done.status == 0 and "raised an exception" not in done.log, done.log
    found = dispatches(journal)
    assert found[: len(before)] == before and [ticket for ticket, *_ in found] == list(range(len(found)))
    with closing(read_journal(journal)) as record:
        names, status = record.table()[0].names, {}
        for reply in record.replies():
            status.setdefault(names[reply.client], set()).add(Status(reply.status))
        assert len(record.events("new-model")) == 8
    assert status["partition-0"] == {Status.OK} and status["partition-2"] == {Status.FAILED}
    assert status["partition-3"] == {Status.MISSING}
