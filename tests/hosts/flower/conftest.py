"""An in-process federation: real ClientApps behind a grid of our own, on a clock that moves only in ``sleep``."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedcohort.core.signals import Signal
from fedcohort.hosts import Policy
from fedcohort.hosts.flower import Answers, CohortStrategy, Facts, cohort_client


class Clock:
    """Time that passes only in ``sleep``."""

    def __init__(self) -> None:
        self.now = 0.0
        self.at: list[tuple[float, Callable[[], None]]] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        due = [item for item in self.at if item[0] <= self.now]
        self.at = [item for item in self.at if item[0] > self.now]
        for _, action in due:
            action()


@dataclass
class Node:
    app: ClientApp
    config: dict[str, Any]
    latency: float | Callable[[Message], float] = 1.0
    registered: str = ""
    busy_until: float = 0.0


@dataclass
class _Sent:
    node: int
    message: Message
    ready: float
    expires: float


class FakeGrid(Grid):
    """Nodes that can be added, cut off and replaced during a run; one killed with SIGKILL stays listed for a while."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.nodes: dict[int, Node] = {}
        self.dead: set[int] = set()  # listed as online, but not running
        self.log: list[Message] = []
        self.replies: list[Message] = []  # from clients, in the order in which they were pulled
        self.run_config: dict[str, Any] = {}
        self.hooks: list[Callable[[Message], None]] = []
        self._sent: dict[str, _Sent] = {}
        self._ids = itertools.count(1)
        # Flower stamps every message with the task that writes it.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

    def add(self, node: Node, node_id: int | None = None) -> int:
        node_id = 1000 + 17 * next(self._ids) if node_id is None else node_id
        self.nodes[node_id] = node
        return node_id

    def node_of(self, name: str) -> int:
        return next(
            i for i, node in self.nodes.items() if node.config.get("client-name") == name and i not in self.dead
        )

    def cut(self, node_id: int) -> None:
        self.dead.add(node_id)

    def remove(self, node_id: int) -> None:
        del self.nodes[node_id]
        self.dead.discard(node_id)

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def get_nodes(self) -> Iterable[Any]:
        return [SimpleNamespace(node_id=i, name=n.registered or "") for i, n in self.nodes.items()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            for hook in self.hooks:
                hook(message)
            message_id = f"m{next(self._ids)}"
            message.metadata.__dict__["_message_id"] = message_id
            node_id = message.metadata.dst_node_id
            node = self.nodes.get(node_id) or Node(ClientApp(), {})  # gone since it was listed: the pull will say so
            latency = node.latency(message) if callable(node.latency) else node.latency
            if not message.metadata.message_type.startswith("train"):
                latency = min(latency, 0.5)
            # A SuperNode works on one message at a time.
            ready = max(self.clock.now, node.busy_until) + latency
            node.busy_until = ready
            self._sent[message_id] = _Sent(node_id, message, ready, self.clock.now + message.metadata.ttl)
            self.log.append(message)
            ids.append(message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        found = []
        for message_id in list(message_ids):
            sent = self._sent.get(message_id)
            if sent is None or self.clock.now > sent.expires:
                found.append(self._error(message_id, ErrorCode.MESSAGE_UNAVAILABLE, "Message Unavailable"))
            elif sent.node not in self.nodes:
                found.append(self._error(message_id, ErrorCode.NODE_UNAVAILABLE, "Node Unavailable"))
            elif sent.node not in self.dead and self.clock.now >= sent.ready:
                found.append(self._work(sent))
                self.replies.append(found[-1])
            else:
                continue
            self._sent.pop(message_id, None)
        return found

    def _error(self, message_id: str, code: int, reason: str) -> Message:
        original = self._sent[message_id].message if message_id in self._sent else None
        if original is None:
            raise KeyError(message_id)
        return Message(Error(code, reason), reply_to=original)

    def _work(self, sent: _Sent) -> Message:
        node = self.nodes[sent.node]
        context = Context(
            run_id=1,
            node_id=sent.node,
            node_config=dict(node.config),
            state=RecordDict(),
            run_config=dict(self.run_config),
            series_id=1,
        )
        message = copy.deepcopy(sent.message)
        try:
            return node.app(message, context)
        except Exception as error:
            reason = f"{type(error)}:<'{error}'>"
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=sent.message)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise AssertionError("polls every three seconds and cannot stop early")


Train = Callable[[Message, Context], RecordDict]


def model(value: float = 0.0, *, counter: bool = True) -> ArrayRecord:
    """A model of two float arrays and a counter, as a torch model with batch norm has."""
    arrays = ArrayRecord(
        {
            "weight": Array(np.full((2, 3), value, np.float32)),
            "bias": Array(np.full(3, value, np.float32)),
        }
    )
    if counter:
        arrays["seen"] = Array(np.array(0, np.int64))
    return arrays


def step(message: Message, context: Context) -> RecordDict:
    """Add 1 + the client's number to every float array; weight by 10 times as much."""
    number = int(context.node_config.get("partition-id", 0))
    arrays = message.content["arrays"]
    old = {key: array.numpy() for key, array in arrays.items()}
    moved = {k: Array(np.asarray(a + a.dtype.type(1 + number if k != "seen" else 0))) for k, a in old.items()}
    metrics = MetricRecord({"num-examples": 10 * (1 + number), "train-loss": float(number)})
    return RecordDict({"arrays": ArrayRecord(moved), "metrics": metrics})


def client_app(train: Train = step, mods: Sequence[Any] = (), weight: float = 1) -> ClientApp:
    app = ClientApp(mods=list(mods))

    @app.train()
    def _train(message: Message, context: Context) -> Message:
        return Message(train(message, context), reply_to=message)

    @app.evaluate()
    def _evaluate(message: Message, context: Context) -> Message:
        value = float(message.content["arrays"]["bias"].numpy()[0])
        return Message(RecordDict({"m": MetricRecord({"num-examples": weight, "value": value})}), reply_to=message)

    return app


def facts(context: Context) -> Facts:
    number = int(context.node_config["partition-id"])
    return Facts(size=10 * (1 + number), label_counts=[number, 10])


def losses(arrays: ArrayRecord, context: Context, received: ArrayRecord) -> dict[str, float]:
    """The further the bias is from the client's number, the worse."""
    number = int(context.node_config["partition-id"])
    return {"loss": float(abs(arrays["bias"].numpy()[0] - number)) + 0.5}


def gradient(arrays: ArrayRecord, context: Context) -> Any:
    return np.full(9, float(context.node_config["partition-id"]))


ANSWERS = Answers(facts=facts, losses=losses, signals=frozenset({Signal.LOSS}), gradient=gradient)


def with_policy(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in which the fields of the policy, which tests write beside the others, are one."""
    names = {field.name for field in fields(Policy)} | {"cohort_size"}
    if "policy" in settings:
        return dict(settings)
    policy = {"size" if key == "cohort_size" else key: settings[key] for key in names & settings.keys()}
    return {**{key: value for key, value in settings.items() if key not in names}, "policy": Policy(**policy)}


@dataclass
class Fleet:
    """A grid with named nodes and strategies on its clock."""

    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.grid = FakeGrid(self.clock)

    def node(self, number: int, app: ClientApp | None = None, **kwargs: Any) -> Node:
        app = cohort_client(client_app(), ANSWERS) if app is None else app
        return Node(app, {"client-name": f"client-{number}", "partition-id": number}, **kwargs)

    def fill(self, count: int) -> None:
        for number in range(count):
            self.grid.add(self.node(number))

    def strategy(self, *args: Any, **kwargs: Any) -> CohortStrategy:
        strategy = CohortStrategy(*args, **with_policy(kwargs))
        strategy.clock, strategy.sleep = self.clock, self.clock.sleep
        return strategy

    def trained(self) -> list[tuple[int, int]]:
        """Who was sent a train message, as (node id, server round)."""
        return [(m.metadata.dst_node_id, m.content["config"]["server-round"])
                for m in self.grid.log if m.metadata.message_type == "train"]  # fmt: skip

    def names(self, server_round: int) -> list[str]:
        return [self.grid.nodes[n].config["client-name"] for n, r in self.trained() if r == server_round]


_PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "{name}"
version = "1.0.0"
description = "an app of the tests"
license = "Apache-2.0"
dependencies = []
[tool.hatch.build.targets.wheel]
packages = ["."]
[tool.flwr.app]
publisher = "me"
[tool.flwr.app.components]
serverapp = "{name}.server:app"
clientapp = "{name}.client:app"
[tool.flwr.app.config]
{config}
"""


def flower_app(folder: Path, name: str, server: str, client: str, config: Mapping[str, Any]) -> Path:
    """Write a Flower app for real processes: its server and client modules, and the defaults of its run config."""
    (folder / name).mkdir(parents=True)
    defaults = "\n".join(f"{key} = {json.dumps(value)}" for key, value in config.items())
    (folder / "pyproject.toml").write_text(_PROJECT.format(name=name, config=defaults))
    for module, text in (("__init__", ""), ("server", server), ("client", client)):
        (folder / name / f"{module}.py").write_text(text)
    return folder


@pytest.fixture
def fleet() -> Fleet:
    made = Fleet()
    made.fill(6)
    return made


@pytest.fixture
def empty_fleet() -> Fleet:
    return Fleet()


@pytest.fixture(scope="session")
def kit() -> Any:
    """The helpers above, for test modules that cannot import from here."""

    class Kit:
        pass

    from .loopback import Loopback  # here, because a test's own process imports this module by its path

    for thing in (model, step, client_app, facts, losses, gradient, flower_app, Fleet, Node, Clock, FakeGrid, Loopback):
        setattr(Kit, thing.__name__, staticmethod(thing) if not isinstance(thing, type) else thing)
    Kit.ANSWERS = ANSWERS
    return Kit
