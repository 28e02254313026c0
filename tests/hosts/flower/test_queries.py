"""Questions to clients on an in-process grid: losses before the choice, and trials."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from flwr.serverapp.strategy import (
    FedAdam,
    FedAvg,
)

from fedcohort.core.clients import ClientTable
from fedcohort.core.protocol import (
    Answer,
    Cohort,
    Outcome,
    Selector,
    Slate,
    Trial,
)
from fedcohort.core.signals import Signal
from fedcohort.hosts.flower.wire import LOSSES
from fedcohort.selectors import PowerOfChoice
from fedcohort.session import Session


def test_losses_are_asked_before_the_choice(fleet: Any, kit: Any) -> None:
    """With d = all candidates Power-of-Choice picks those of the largest loss: at 0 the clients of largest number."""
    strategy = fleet.strategy(PowerOfChoice(d=6), FedAvg(fraction_train=0.34, min_train_nodes=2))
    strategy.start(fleet.grid, kit.model(), num_rounds=1)
    assert sorted(fleet.names(1)) == ["client-4", "client-5"]
    asked = [m for m in fleet.grid.log if m.metadata.message_type == "query.fedcohort_losses"]
    assert len(asked) == 6


def test_silence_on_a_loss_query_is_nan(fleet: Any, kit: Any) -> None:
    """Client 5 would be picked first, but does not report its loss in time."""
    fleet.grid.nodes[fleet.grid.node_of("client-5")].busy_until = 0.4
    strategy = fleet.strategy(PowerOfChoice(d=6), FedAvg(fraction_train=0.34), query_deadline=0.6)
    fleet.grid.hooks.append(
        lambda m: (
            m.metadata.message_type == "query.fedcohort_losses"
            and setattr(fleet.grid.nodes[fleet.grid.node_of("client-5")], "busy_until", fleet.clock.now + 5)
        )
    )
    strategy.start(fleet.grid, kit.model(), num_rounds=1)
    assert "client-5" not in fleet.names(1)


@dataclass(frozen=True)
class Seen:
    change: Any


@dataclass(frozen=True, kw_only=True)
class Trying(Selector[Seen]):
    """Tries {0, 1} and {2} before it picks, and notes what it learnt."""

    @property
    def requires(self) -> frozenset[Signal]:
        return frozenset({Signal.TRIAL_QUERY})

    def init(self, clients: ClientTable, rng: np.random.Generator) -> Seen:
        return Seen(np.zeros((2, clients.n)))

    def query(self, state: Seen, slate: Slate, rng: Any) -> Trial:
        return Trial((np.array([0, 1]), np.array([2])))

    def select(self, state: Seen, slate: Slate, answer: Answer | None, rng: Any) -> tuple[Cohort, Seen]:
        assert answer is not None
        return Cohort(slate.candidates[: slate.size]), Seen(answer[Signal.LOSS_CHANGE])

    def update(self, state: Seen, outcome: Outcome) -> Seen:
        return state


def test_a_trial_trains_and_averages_and_is_thrown_away(fleet: Any, kit: Any, tmp_path: Path) -> None:
    inner = FedAdam(fraction_train=0.34, beta_1=0.0)
    strategy = fleet.strategy(Trying(), inner, journal=tmp_path / "j")
    strategy.start(fleet.grid, kit.model(), num_rounds=1)
    with Session.open(tmp_path / "j", Trying()) as session:
        change = session.state.change
    numbers = np.arange(6.0)
    moved = (1 * 10 + 2 * 20) / 30  # clients 0 and 1, weighted by their examples
    np.testing.assert_allclose(change[0], np.abs(moved - numbers) - numbers, rtol=1e-6)
    np.testing.assert_allclose(change[1], np.abs(3 - numbers) - numbers, rtol=1e-6)
    assert inner.m_t is not None and float(inner.m_t["bias"][0]) == pytest.approx(moved)  # only the round left a trace


class Watching(PowerOfChoice):
    """Asks everybody, and keeps what came back."""

    seen: ClassVar[list[Any]] = []

    def select(self, state: Any, slate: Slate, answer: Answer | None, rng: Any) -> Any:
        assert answer is not None
        self.seen.append(answer[Signal.LOSS].copy())
        return super().select(state, slate, answer, rng)


def test_a_losses_query_names_clients_that_left(fleet: Any, kit: Any) -> None:
    gone = fleet.grid.node_of("client-4")
    fleet.grid.hooks.append(
        lambda message: fleet.grid.nodes.pop(gone, None) if message.metadata.message_type == LOSSES else None
    )
    Watching.seen.clear()
    fleet.strategy(Watching(d=6), FedAvg(fraction_train=0.34)).start(fleet.grid, kit.model(), num_rounds=1)
    np.testing.assert_allclose(Watching.seen[0], [0.5, 1.5, 2.5, 3.5, np.nan, 5.5])
