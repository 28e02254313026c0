"""Calls of everything public with arguments that make no sense, one after the other, from a seed.

Each recipe is a sound call. A case takes one, replaces one or two of its arguments by garbage, and calls; whatever is
raised must be an error of the library's own.
"""

from __future__ import annotations

import decimal
import inspect
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import fedcohort
from fedcohort import ClientTable, Cohort, LabelCounts, Losses, Session, Signal, Trial, create
from fedcohort.core.clients import LabelFactor, LabelGram
from fedcohort.core.errors import FedcohortError
from fedcohort.core.params import parameters
from fedcohort.core.protocol import SELECTORS, Answer, RoundReport, RoundRequest
from fedcohort.core.signals import LossMeasure, LossOf, OnServer, VectorOf
from fedcohort.session.rules import Rules


class Odd:
    """An object whose every question is answered by an error."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no equality")

    __hash__ = object.__hash__

    def __len__(self) -> int:
        raise RuntimeError("no length")

    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError("no items")


def garbage() -> list[Any]:
    """Things nobody should pass, and some that are only wrong in most places."""
    cycle: list[Any] = []
    cycle.append(cycle)
    return [
        None,
        True,
        False,
        -1,
        0,
        3,
        2**70,
        10**400,
        -(10**400),
        1.5,
        -0.5,
        float("nan"),
        float("inf"),
        1j,
        decimal.Decimal("1.5"),
        "",
        "x",
        "loss",
        "\x00",
        "a" * 3000,
        b"",
        b"\xff\x00",
        bytearray(b"x"),
        [],
        [None],
        [[]],
        [1, "a"],
        [[1], [1, 2]],
        [0.5],
        [float("nan")],
        [-1],
        [2**70],
        [True],
        ["a", "a"],
        (),
        (1,),
        {},
        {1: 2},
        {"a": object()},
        {Signal.LOSS: [None]},
        {"x": {}},
        set(),
        {1},
        frozenset({"a"}),
        range(3),
        object(),
        object,
        int,
        len,
        lambda: 1,
        Odd(),
        cycle,
        np.array([1.5, 2.0]),
        np.array(["a"]),
        np.array([None]),
        np.zeros((2, 2)),
        np.zeros((0, 3)),
        np.array(5),
        np.int64(-7),
        np.float32("inf"),
        np.datetime64("2020-01-01"),
        np.ma.masked,
        np.array([1 + 2j]),
        np.ones((1, 2, 3)),
        iter([1]),
        (i for i in range(2)),
        Signal.LOSS,
        Signal.SIZES,
        Path("/no/such/file"),
        Path("/"),
        slice(1),
        ...,
        NotImplemented,
        Exception("x"),
        memoryview(b"abc"),
        np.random.default_rng(0),
        fedcohort,
        create("uniform"),
        create,
    ]


@dataclass(frozen=True)
class Recipe:
    """A sound call: what is called, and with which keywords."""

    name: str
    call: Callable[..., Any]
    arguments: Callable[[], dict[str, Any]]


def table(n: int = 4) -> ClientTable:
    return ClientTable(names=[f"c{i}" for i in range(n)], sizes=[10.0] * n, labels=LabelCounts(np.ones((n, 3))))


def session(selector: str = "uniform") -> Session:
    return Session(create(selector), table())


def asked(selector: str = "uniform") -> tuple[Session, Cohort]:
    live = session(selector)
    return live, live.ask(RoundRequest(2))


def _method(name: str, prepare: Callable[[], Any], method: str, /, **arguments: Callable[[], Any]) -> Recipe:
    """A method of something made anew for each call."""

    def call(**given: Any) -> Any:
        return getattr(given.pop("self_"), method)(**given)

    return Recipe(name, call, lambda: {"self_": prepare(), **{k: make() for k, make in arguments.items()}})


def core() -> list[Recipe]:
    """What ``fedcohort`` exports."""
    query = Losses(np.array([0, 1]))

    def told(**given: Any) -> None:
        live, cohort = asked("oort")
        report = {"ticket": cohort.ticket, "clients": cohort.names, **given}
        live.tell(RoundReport(**report))

    def asked_with(**given: Any) -> None:
        session("balanced").ask(RoundRequest(**given))

    def answered(**given: Any) -> None:
        live = session("power-of-choice")
        request = RoundRequest(2)
        found = live.query(request)
        live.ask(request, Answer(found, {Signal.LOSS: np.ones(len(found.clients)), **given}))

    recipes = [
        Recipe("Answer", Answer, lambda: {"query": query, "values": {Signal.LOSS: [1.0, 2.0]}}),
        Recipe(
            "ClientTable",
            ClientTable,
            lambda: {"names": ["a", "b"], "sizes": [1, 2], "labels": LabelCounts([[1], [2]]), "n": 2},
        ),
        Recipe(
            "Cohort",
            Cohort,
            lambda: {
                "clients": [0, 1],
                "candidates": np.arange(3),
                "score": np.ones(3),
                "parts": {"a": np.ones(3)},
                "weights": [1.0, 1.0],
                "work": [1.0, 1.0],
                "notes": {"a": 1},
                "stop": None,
            },
        ),
        Recipe("LabelCounts", LabelCounts, lambda: {"counts": [[1, 2], [3, 4]]}),
        Recipe("LabelFactor", LabelFactor, lambda: {"factor": [[1, 2], [3, 4]], "classes": 2}),
        Recipe("LabelGram", LabelGram, lambda: {"gram": [[1, 2], [2, 4]], "classes": 2}),
        Recipe("Losses", Losses, lambda: {"clients": [0, 1], "signals": frozenset({Signal.LOSS})}),
        Recipe("Trial", Trial, lambda: {"cohorts": ([0], [1])}),
        Recipe("LossMeasure", LossMeasure, lambda: {"part": "train", "loss": "label", "mean": "mean"}),
        Recipe("LossOf", LossOf, lambda: {"measure": LossMeasure(), "model": "own"}),
        Recipe("VectorOf", VectorOf, lambda: {"vector": "update", "take": "norm"}),
        Recipe("OnServer", OnServer, lambda: {"values": len, "stream": "own"}),
        Recipe("RoundRequest", asked_with, lambda: {"size": 2, "available": [0, 1, 2]}),
        Recipe(
            "RoundReport",
            told,
            lambda: {
                "status": [0, 0],
                "metrics": {Signal.LOSS_RMS: [1.0, 2.0], Signal.DURATION: [1.0, 2.0]},
                "kept": [True, True],
                "complete": True,
            },
        ),
        Recipe("RoundReport of garbage", told, lambda: {"ticket": 0, "clients": []}),
        Recipe(
            "RoundReport of metrics",
            lambda **given: told(metrics={Signal.LOSS_RMS: given["a"], Signal.DURATION: given["b"]}),
            lambda: {"a": [1.0, 2.0], "b": [1.0, 1.0]},
        ),
        Recipe(
            "Answer of garbage",
            lambda **given: answered(**{}) if not given else answered(**{"loss": given["loss"]}),
            lambda: {"loss": [1.0, 1.0, 1.0, 1.0]},
        ),
        Recipe(
            "Session",
            Session,
            lambda: {
                "selector": create("uniform"),
                "clients": table(),
                "seed": 1,
                "signals": {Signal.LOSS},
                "journal": None,
                "shadows": {"s": create("uniform")},
                "rules": Rules(),
                "commit": "always",
                "audit": False,
            },
        ),
        Recipe(
            "create", lambda **given: create(given["name"], d=given["d"]), lambda: {"name": "power-of-choice", "d": 3}
        ),
        Recipe("register", lambda **given: SELECTORS.get(given["name"]), lambda: {"name": "uniform"}),
        _method("Session.ask", session, "ask", request=lambda: RoundRequest(2), answer=lambda: None),
        _method("Session.query", session, "query", request=lambda: RoundRequest(2)),
        _method("Session.eligibility", session, "eligibility", request=lambda: RoundRequest(2)),
        _method("Session.tell", lambda: asked()[0], "tell", report=lambda: RoundReport(0, []), host=lambda: None),
        _method("Session.abandon", lambda: asked()[0], "abandon", ticket=lambda: 0, reason=lambda: "x"),
        _method("Session.record", lambda: asked()[0], "record", round_=lambda: 0, metrics=lambda: {"a": 1.0}),
        _method("Session.note", session, "note", kind=lambda: "x", body=lambda: {"a": 1}),
        _method("Session.explain", lambda: asked()[0], "explain", round_=lambda: 0, client=lambda: "c0"),
        _method(
            "Session.join",
            session,
            "join",
            clients=lambda: ClientTable(names=["new"], sizes=[3.0], labels=LabelCounts([[1, 1, 1]])),
        ),
        _method("Session.leave", session, "leave", clients=lambda: ["c0"]),
        _method("Session.rejoin", session, "rejoin", clients=lambda: ["c0"]),
        _method("Session.set_rules", session, "set_rules", rules=Rules),
        _method(
            "Session.set_attributes",
            lambda: Session(create("uniform"), table(), rules=Rules()),
            "set_attributes",
            attributes=lambda: {"c0": {"battery": 3}},
        ),
        _method("Session.update_facts", session, "update_facts", table=table),
        _method("Session.forget", session, "forget", client=lambda: "c0"),
        _method("Session.change_selector", session, "change_selector", selector=lambda: create("all")),
        _method("Session.add_shadow", session, "add_shadow", name=lambda: "s", shadow=lambda: create("all")),
        _method("Session.remove_shadow", session, "remove_shadow", name=lambda: "s"),
        Recipe(
            "Session.open",
            Session.open,
            lambda: {"path": "/no/such/journal", "selector": None, "shadows": None, "rules": None, "commit": "always"},
        ),
        Recipe(
            "Session.open_or_create",
            Session.open_or_create,
            lambda: {"path": "/no/such/folder/j.sqlite", "selector": create("uniform"), "clients": table(), "seed": 1},
        ),
        _method("ClientTable.index", table, "index", name=lambda: "c0"),
        _method("ClientTable.indices", table, "indices", clients=lambda: ["c0"]),
        _method("ClientTable.name", table, "name", client=lambda: 0),
        _method("ClientTable.names_of", table, "names_of", clients=lambda: np.array([0])),
        _method("ClientTable.granting", table, "granting", signals=lambda: frozenset({Signal.SIZES})),
        _method("ClientTable.differing", table, "differing", other=table),
        _method(
            "ClientTable.with_clients",
            table,
            "with_clients",
            other=lambda: ClientTable(names=["new"], sizes=[3.0], labels=LabelCounts([[1, 1, 1]])),
        ),
    ]
    return recipes


def of_class(cls: type, name: str | None = None, **given: Callable[[], Any]) -> Recipe:
    """A constructor with its own defaults, and with what has none."""
    known = [p for p in inspect.signature(cls).parameters.values() if p.default is not inspect.Parameter.empty]
    defaults = {p.name: p.default for p in known if "factory" not in repr(p.default)}
    return Recipe(name or cls.__name__, cls, lambda: {**defaults, **{k: make() for k, make in given.items()}})


def declared() -> list[Recipe]:
    """Everything with declared parameters that a registry knows: selectors, filters, aggregators, scenarios, data."""
    from fedcohort.scenario import PARTITIONS, Scenario
    from fedcohort.simulate.data import DATASETS
    from fedcohort.simulate.label_sharing import LABEL_SHARING
    from fedcohort.training.aggregators import AGGREGATORS
    from fedcohort.training.filters import FILTERS
    from fedcohort.training.local import LocalTraining

    found = []
    for registry in (SELECTORS, FILTERS, AGGREGATORS, PARTITIONS, DATASETS, LABEL_SHARING):
        for name in registry:
            item = registry.get(name)
            if isinstance(item, type) and parameters(item):
                required = {
                    i.name: (lambda: "x") for i in parameters(item) if repr(i.default).startswith("<dataclasses")
                }
                found.append(of_class(item, f"{registry.kind} {name}", **required))
    return [*found, of_class(Rules), of_class(Scenario), of_class(LocalTraining, steps=lambda: 1)]


def simulator() -> list[Recipe]:
    """What people call in the simulator."""
    import pandas

    from fedcohort.simulate.config.experiment import Experiment
    from fedcohort.simulate.data import from_arrays, from_pandas, load_dataset
    from fedcohort.simulate.store.results import load

    x, y = np.zeros((6, 4), np.float32), np.array([0, 1, 0, 1, 0, 1])
    frame = pandas.DataFrame({"a": [0.0, 1.0] * 5, "label": [0, 1] * 5, "who": ["x", "y"] * 5})
    return [
        Recipe("from_pandas", from_pandas, lambda: {"frame": frame, "label": "label", "client": "who"}),
        Recipe(
            "from_arrays",
            from_arrays,
            lambda: {
                "x": x,
                "y": y,
                "x_test": x,
                "y_test": y,
                "name": "a",
                "target": "class",
                "test_share": 0.2,
                "seed": 0,
                "classes": 2,
                "class_names": ["a", "b"],
            },
        ),
        Recipe(
            "load_dataset",
            lambda **given: load_dataset(given["name"], folder=given["folder"]),
            lambda: {"name": "synthetic", "folder": None},
        ),
        Recipe("results.load", load, lambda: {"path": "/no/such/experiment"}),
        Recipe("Experiment.from_dict", Experiment.from_dict, lambda: {"table": {"selectors": {"uniform": {}}}}),
    ]


def private() -> list[Recipe]:
    """What ``fedcohort.privacy`` exports and can be called without a key holder."""
    from fedcohort.audit.choices import verify
    from fedcohort.privacy import (
        GaussianNoise,
        GeometricNoise,
        Ledger,
        LossNoise,
        NoisyLabels,
        RotatedLabels,
        SecretRotation,
        audit,
    )

    rng = np.random.default_rng
    return [
        of_class(GaussianNoise),
        of_class(GeometricNoise),
        of_class(LossNoise),
        of_class(Ledger, epsilon=lambda: 1.0),
        of_class(NoisyLabels, classes=lambda: 3),
        of_class(RotatedLabels, classes=lambda: 3),
        of_class(SecretRotation, seed=lambda: b"x" * 32, classes=lambda: 3),
        _method("GeometricNoise.noisy", GeometricNoise, "noisy", counts=lambda: [1, 2]),
        _method("LossNoise.noisy_mean", LossNoise, "noisy_mean", losses=lambda: [1.0, 2.0]),
        _method("SecretRotation.rotate", lambda: SecretRotation(b"x" * 32, 3), "rotate", counts=lambda: [1, 2, 3]),
        _method(
            "SecretRotation.seal",
            lambda: SecretRotation(b"x" * 32, 3),
            "seal",
            client=lambda: "a",
            counts=lambda: [1, 2, 3],
        ),
        _method("NoisyLabels.check", lambda: NoisyLabels(3), "check", client=lambda: "a", sealed=lambda: b"x"),
        Recipe(
            "audit", audit, lambda: {"counts": [[3, 1], [1, 3]], "names": ["a", "b"], "epsilons": (1.0,), "rng": rng(0)}
        ),
        Recipe("verify", verify, lambda: {"path": "/no/such/journal", "selector": None, "seed": 1, "receipts": None}),
    ]


def live() -> list[Recipe]:
    """What ``fedcohort.hosts.flower`` exports."""
    from flwr.clientapp import ClientApp
    from flwr.serverapp.strategy import FedAvg

    from fedcohort.hosts.flower import (
        Answers,
        AsyncCohortStrategy,
        CohortStrategy,
        Facts,
        Private,
        cohort_client,
        corrections,
        failures,
        torch_answers,
    )

    return [
        Recipe(
            "CohortStrategy",
            CohortStrategy,
            lambda: {
                "selector": "uniform",
                "strategy": FedAvg(),
                "journal": None,
                "seed": 0,
                "cohort_size": 2,
                "spares": 0,
                "deadline": None,
                "query_deadline": 60.0,
            },
        ),
        Recipe(
            "AsyncCohortStrategy",
            AsyncCohortStrategy,
            lambda: {
                "selector": "uniform",
                "strategy": FedAvg(),
                "busy": 3,
                "buffer": 2,
                "period": None,
                "aggregator": "fedbuff",
                "journal": None,
                "seed": 0,
                "deadline": None,
            },
        ),
        Recipe("Answers", Answers, lambda: {"facts": None, "losses": None, "reports": {}}),
        Recipe("Facts", Facts, lambda: {"size": 3, "label_counts": [1, 2], "sealed_labels": None, "attributes": {}}),
        Recipe("cohort_client", cohort_client, lambda: {"app": ClientApp(), "answers": None}),
        Recipe("corrections", corrections, lambda: {"journal": "/no/such/journal"}),
        Recipe("failures", failures, lambda: {"journal": "/no/such/journal"}),
        Recipe("torch_answers", torch_answers, lambda: {"model": lambda c: None, "data": lambda c: None, "classes": 3}),
        Recipe("Private", Private, lambda: {"ledger": lambda c: None}),
    ]


def recipes(flower: bool = True) -> list[Recipe]:
    return [*core(), *declared(), *simulator(), *private(), *(live() if flower else [])]


def run(found: list[Recipe], cases: int, seed: int = 0) -> tuple[Counter[str], list[str]]:
    """Make ``cases`` calls; return how they ended, and what was raised raw."""
    rng = random.Random(seed)
    ends: Counter[str] = Counter()
    raw: list[str] = []
    for case in range(cases):
        recipe = found[case % len(found)]
        arguments = recipe.arguments()
        keys = [key for key in arguments if key != "self_"]
        wrong = rng.sample(keys, min(len(keys), rng.choice((1, 1, 1, 2)))) if keys else []
        things = garbage()
        picked = {key: things[rng.randrange(len(things))] for key in wrong}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                recipe.call(**{**arguments, **picked})
        except FedcohortError as error:
            ends["refused"] += 1
            str(error)
        except Exception as error:
            ends["raw"] += 1
            shown = {key: _short(value) for key, value in picked.items()}
            raw.append(f"{recipe.name}({shown}): {type(error).__name__}: {_short(error)}")
        else:
            ends["accepted"] += 1
    return ends, raw


def _short(value: object) -> str:
    try:
        return repr(value)[:120]
    except Exception:
        return f"<{type(value).__name__}>"
