"""A run that is interrupted anywhere and started again ends like an uninterrupted one."""

from __future__ import annotations

import itertools
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, MetricRecord
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideAdaptiveClipping,
    FedAdam,
    FedAvg,
    FedAvgM,
)
from safetensors.numpy import load_file

from fedcohort.core.errors import JournalError
from fedcohort.hosts import live_run
from fedcohort.hosts.flower.checkpoint import Checkpoints
from fedcohort.hosts.flower.wrapped_strategy import InnerStrategyError, StrategyState, WrappedStrategy
from fedcohort.journal import read_journal
from fedcohort.session import Session

ROUNDS = 5


class PowerCut(BaseException):
    """Ends the process, as far as the strategy can tell."""


def adam() -> Any:
    return FedAdam(fraction_train=0.5, eta=0.1, beta_1=0.9, beta_2=0.99)


def momentum() -> Any:
    return FedAvgM(fraction_train=0.5, server_momentum=0.9)


def private() -> Any:
    return DifferentialPrivacyServerSideAdaptiveClipping(adam(), 0.0, 3, initial_clipping_norm=2.0)


def fresh(kit: Any, skip: int) -> Any:
    """A federation of the same clients under other node ids, in another order of appearance."""
    fleet = kit.Fleet()
    for number in np.roll(np.arange(6), skip).tolist():
        fleet.grid.add(fleet.node(number), node_id=100 * (skip + 1) + number)
    return fleet


def start(kit: Any, inner: Any, journal: Path, skip: int = 0, value: float = 0.0, **hooks: Any) -> Any:
    fleet = fresh(kit, skip)
    strategy = fleet.strategy("power-of-choice", inner, journal=journal, seed=4)
    if "on_push" in hooks:
        fleet.grid.hooks.append(hooks["on_push"])
    return strategy.start(fleet.grid, kit.model(value), ROUNDS, evaluate_fn=hooks.get("evaluate", lambda r, a: None))


def cut_in(monkeypatch: Any, owner: Any, name: str, call: int, *, after: bool) -> None:
    """Cut the power at the ``call``-th call of a method, before or after it did its work."""
    original = getattr(owner, name)
    count = itertools.count(1)

    def method(*args: Any, **kwargs: Any) -> Any:
        now = next(count)
        if now == call and not after:
            raise PowerCut
        result = original(*args, **kwargs)
        if now == call:
            raise PowerCut
        return result

    monkeypatch.setattr(owner, name, method)


POINTS = [
    (Session, "query", 3, False),
    (Session, "ask", 1, False),
    (Session, "ask", 1, True),
    (Session, "ask", 3, True),
    (Checkpoints, "save", 1, True),  # the first model, before round 1
    (Checkpoints, "save", 4, False),
    (Checkpoints, "save", 4, True),  # a file that the journal does not name
    (Session, "tell", 3, False),
    (Session, "tell", 3, True),
    (Checkpoints, "prune", 3, False),
    (Session, "record", 2, False),
]


@pytest.mark.parametrize(
    ("make", "owner", "name", "call", "after"),
    [(private, *point) for point in POINTS] + [(momentum, *POINTS[6]), (momentum, *POINTS[8]), (adam, *POINTS[7])],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_cut_off_anywhere(
    make: Any, owner: Any, name: str, call: int, after: bool, kit: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    whole = start(kit, make(), tmp_path / "whole", evaluate=lambda r, a: MetricRecord({"accuracy": 0.1}))
    with monkeypatch.context() as patch:
        cut_in(patch, owner, name, call, after=after)
        with pytest.raises(PowerCut):
            start(kit, make(), tmp_path / "cut", evaluate=lambda r, a: MetricRecord({"accuracy": 0.1}))
    # The app is started again with another random first model, other node ids, and a fresh strategy object.
    again = start(kit, make(), tmp_path / "cut", skip=2, value=0.0 if call == 1 else 5.0)
    for key in ("weight", "bias", "seen"):
        np.testing.assert_array_equal(again.arrays[key].numpy(), whole.arrays[key].numpy(), strict=True)
    rows = [read_journal(tmp_path / f).cohorts() for f in ("whole", "cut")]
    assert [r.clients.tolist() for r in rows[0]] == [r.clients.tolist() for r in rows[1]]
    assert Counter(r.round for r in rows[1]) == Counter(range(ROUNDS))
    assert all(r.told_at is not None for r in rows[1])
    replies = read_journal(tmp_path / "cut").replies()
    assert len({(r.ticket, r.client) for r in replies}) == len(replies) == 3 * ROUNDS


def test_cut_off_twice_while_training(kit: Any, tmp_path: Path) -> None:
    whole = start(kit, adam(), tmp_path / "whole")
    for attempt, server_round in enumerate((2, 2, 4)):
        seen = itertools.count()

        def on_push(message: Any, wanted: int = server_round, seen: Any = seen) -> None:
            train = message.metadata.message_type == "train"
            if train and message.content["config"]["server-round"] == wanted and next(seen) == 1:
                raise PowerCut  # after the first of three messages went out

        with pytest.raises(PowerCut):
            start(kit, adam(), tmp_path / "cut", skip=attempt, on_push=on_push)
    again = start(kit, adam(), tmp_path / "cut", skip=4)
    np.testing.assert_array_equal(again.arrays["bias"].numpy(), whole.arrays["bias"].numpy())


def test_a_finished_run_started_again_trains_nothing(kit: Any, tmp_path: Path) -> None:
    whole = start(kit, adam(), tmp_path / "j")
    fleet = fresh(kit, 1)
    strategy = fleet.strategy("power-of-choice", adam(), journal=tmp_path / "j", seed=4)
    again = strategy.start(fleet.grid, kit.model(), ROUNDS)
    assert not fleet.trained()
    np.testing.assert_array_equal(again.arrays["bias"].numpy(), whole.arrays["bias"].numpy())
    more = fresh(kit, 1)
    more.strategy("power-of-choice", adam(), journal=tmp_path / "j", seed=4).start(more.grid, kit.model(), ROUNDS + 1)
    assert {r for _, r in more.trained()} == {ROUNDS + 1}


def test_only_the_newest_checkpoints_stay(kit: Any, tmp_path: Path) -> None:
    start(kit, adam(), tmp_path / "j")
    files = sorted(f.name for f in (tmp_path / "j.checkpoints").iterdir())
    assert files == ["after-000004.safetensors", "after-000005.safetensors"]
    tensors = load_file(tmp_path / "j.checkpoints" / files[-1])
    assert {k for k in tensors if k.startswith("model/")} == {"model/weight", "model/bias", "model/seen"}
    assert {k for k in tensors if "m_t" in k} == {f"strategy/0.m_t/{k}" for k in ("weight", "bias", "seen")}


def test_a_lost_checkpoint_is_named(kit: Any, tmp_path: Path) -> None:
    start(kit, FedAvg(), tmp_path / "j")
    (tmp_path / "j.checkpoints" / "after-000005.safetensors").write_bytes(b"torn")
    with pytest.raises(JournalError, match=r"after-000005\.safetensors"):
        start(kit, FedAvg(), tmp_path / "j", skip=1)


def test_memory_names_what_it_cannot_keep(kit: Any, caplog: Any) -> None:
    class Odd(FedAvg):
        pass

    strategy = Odd()
    strategy.history = object()
    memory = StrategyState(WrappedStrategy(strategy))
    strategy.history = object()
    strategy.temperature = np.float64(0.5)
    strategy.moments = [np.arange(3.0), np.ones((2, 2))]
    strategy.anchor = kit.model(2.0)
    plain, arrays = memory.save()
    assert "attribute 'history' of Odd" in caplog.text
    other = Odd()
    StrategyState(WrappedStrategy(other)).restore(plain, arrays)
    assert other.temperature == 0.5
    np.testing.assert_array_equal(other.moments[1], np.ones((2, 2)))
    np.testing.assert_array_equal(other.anchor["bias"].numpy(), kit.model(2.0)["bias"].numpy())
    with pytest.raises(InnerStrategyError, match="2 or more"):
        StrategyState(WrappedStrategy(other)).restore({"1.m_t": {"kind": "plain", "value": 1}}, {})


def test_a_run_that_is_killed_at_its_very_end_is_finished_by_the_next_start(
    kit: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    def power_cut(*_: Any) -> None:
        raise PowerCut

    journal = tmp_path / "j"
    with monkeypatch.context() as patch:
        patch.setattr(live_run, "record_end", power_cut)
        with pytest.raises(PowerCut):
            start(kit, adam(), journal)
    for _ in range(2):
        start(kit, adam(), journal)
    with closing(read_journal(journal)) as record:
        assert [body["state"] for body in record.events("ended")] == ["finished"]


def test_a_privacy_accountant_is_kept() -> None:
    """A budget that a restart forgets is no budget."""

    class Accountant:
        def __init__(self) -> None:
            self.spent = 0

        def state_dict(self) -> dict[str, int]:
            return {"spent": self.spent}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.spent = state["spent"]

    strategy = FedAvg()
    strategy.accountant = Accountant()
    memory = StrategyState(WrappedStrategy(strategy))
    strategy.accountant.spent = 7
    plain, arrays = memory.save()
    other = FedAvg()
    other.accountant = Accountant()
    StrategyState(WrappedStrategy(other)).restore(plain, arrays)
    assert other.accountant.spent == 7


def test_the_order_of_arrays_survives(kit: Any, tmp_path: Path) -> None:
    store = Checkpoints(tmp_path / "c")
    arrays = kit.model(1.5)
    memory = StrategyState(WrappedStrategy(FedAvg()))
    store.save(3, arrays, memory, {"lr": 0.5, "key": b"\x00"})
    config = ConfigRecord({"lr": 1.0, "epochs": 2})
    loaded = store.load("after-000003.safetensors", memory, config)
    assert dict(config) == {"lr": 0.5, "epochs": 2, "key": b"\x00"}
    assert list(loaded) == list(arrays) == ["weight", "bias", "seen"]
    assert all((loaded[k].numpy() == arrays[k].numpy()).all() and loaded[k].dtype == arrays[k].dtype for k in arrays)
    assert not list((tmp_path / "c").glob("*.partial"))
