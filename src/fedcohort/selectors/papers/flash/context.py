r"""The context of FLASH: what is known about each client (Sec. 2.3).

.. [Chang2024] X. Chang et al., "FLASH: Federated Learning Across Simultaneous Heterogeneities", arXiv:2402.08769, 2024.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import numpy as np

from fedcohort.core.arrays import BoolArray, FloatArray, IntArray
from fedcohort.core.protocol import per_client
from fedcohort.core.signals import LossMeasure, LossOf, Signal

VALIDATION_LOSS_AFTER = Signal(
    "validation-loss-after",
    meaning="loss of the client's own model after local training on its held-out data",
    how=LossOf(LossMeasure(part="validation"), "own"),
)
ELEMENTS = ("robust-loss", "validation-loss", "duration", "last-reward")
LOSS_OF = {"robust-loss": Signal.ROBUST_LOSS, "validation-loss": Signal.VALIDATION_LOSS}
OWN_LOSS_OF = {"robust-loss": Signal.ROBUST_LOSS_AFTER, "validation-loss": VALIDATION_LOSS_AFTER}

State = TypeVar("State", bound="ContextState")

# Contexts and rewards are clipped at 100 times their usual size, and durations also at a hundredth of it. Otherwise one
# diverged client, or one reply in no time, would outweigh all other observations in V forever.
LIMIT = 100.0


@dataclass(frozen=True)
class ContextState:
    """What is known about each client, and the rewards so far."""

    rounds: int  # rounds with a report
    time_unit: float  # median duration of the first round; 0 if unknown
    reward_sum: float
    reward_count: int
    robust: FloatArray = per_client()  # (N,) robust loss divided by its first value; 1 if unknown
    validation: FloatArray = per_client()  # (N,) validation loss divided by its first value; 1 if unknown
    duration: FloatArray = per_client()  # (N,) tau of its last round, in units of time_unit; 1 if unknown
    reward: FloatArray = per_client()  # (N,) its last reward
    first_robust: FloatArray = per_client()  # (N,) NaN if unknown
    first_validation: FloatArray = per_client()  # (N,) NaN if unknown
    rewarded: BoolArray = per_client()  # (N,) whether it was ever in a round with a report
    # Clients whose rewards need the next global model.
    waiting: IntArray = field(default_factory=lambda: np.empty(0, np.int64))  # (w,) clients
    waiting_context: FloatArray = field(default_factory=lambda: np.empty((0, 0)))  # (w, d)
    waiting_loss: FloatArray = field(default_factory=lambda: np.empty(0))  # (w,) of the model they received

    @staticmethod
    def unknown(n: int, elements: int) -> dict[str, Any]:
        """Return the fields before the first round, when the context of every client is [1, 1, 1, 0]."""
        ones, unknown = np.ones(n), np.full(n, np.nan)
        return {
            "rounds": 0,
            "time_unit": 0.0,
            "reward_sum": 0.0,
            "reward_count": 0,
            "robust": ones,
            "validation": ones,
            "duration": ones,
            "reward": np.zeros(n),
            "first_robust": unknown,
            "first_validation": unknown,
            "rewarded": np.zeros(n, np.bool_),
            "waiting_context": np.empty((0, elements)),
        }

    def with_rewards(self, clients: IntArray, rewards: FloatArray) -> Self:
        """Return the state after these clients earned these rewards."""
        last = self.reward.copy()
        last[clients] = rewards
        return dataclasses.replace(
            self,
            reward=last,
            reward_sum=self.reward_sum + float(rewards.sum()),
            reward_count=self.reward_count + len(rewards),
        )

    @property
    def mean_reward(self) -> float:
        """The mean of all rewards so far."""
        return self.reward_sum / self.reward_count if self.reward_count else 0.0


def columns(state: ContextState, elements: Sequence[str], clients: IntArray | None) -> dict[str, FloatArray]:
    """Return some elements of the context by name, for these clients (None: for all)."""
    known = {
        "robust-loss": state.robust,
        "validation-loss": state.validation,
        "duration": state.duration,
        "last-reward": state.reward,
    }
    selected = {name: known[name] if clients is None else known[name][clients] for name in elements}
    # The paper starts with all clients. Here some were never asked, and a last reward of 0 would count as a bad one.
    if "last-reward" in elements and not state.rewarded.all():
        rewarded = state.rewarded if clients is None else state.rewarded[clients]
        selected["last-reward"] = np.where(rewarded, selected["last-reward"], state.mean_reward)
    return selected


def contexts(state: ContextState, elements: Sequence[str], clients: IntArray) -> FloatArray:
    """Return the contexts (k, d) of some clients."""
    return np.stack(list(columns(state, elements, clients).values()), axis=1)


def with_losses(state: State, clients: IntArray, losses: Mapping[Signal, FloatArray]) -> State:
    """Return the state with new losses of these clients; a NaN keeps the old value."""
    changes: dict[str, Any] = {}
    for signal, values in losses.items():
        name = "robust" if signal is Signal.ROBUST_LOSS else "validation"
        first, column = getattr(state, f"first_{name}").copy(), getattr(state, name).copy()
        known = np.isfinite(values)
        # Relative to the client's own first loss, as the paper has it: it is that of the first model it received.
        new, loss = clients[known], values[known]
        first[new] = np.where(np.isnan(first[new]), loss, first[new])
        column[new] = relative(loss, first[new])
        changes |= {f"first_{name}": first, name: column}
    return dataclasses.replace(state, **changes)


def relative(loss: FloatArray, first: FloatArray) -> FloatArray:
    """Return the loss divided by its first value, clipped; 1 if both are 0."""
    # Written without a division by a first loss of 0, or by one so small that the ratio would be clipped anyway.
    ratio = np.full(len(loss), LIMIT)
    np.divide(loss, first, out=ratio, where=np.abs(first) > np.abs(loss) / LIMIT)
    ratio[(first == 0) & (loss == 0)] = 1.0
    clipped: FloatArray = np.clip(ratio, -LIMIT, LIMIT)
    return clipped


def time_unit(duration: FloatArray) -> float:
    """Return the median of the positive durations, 0 if there are none."""
    positive = duration[duration > 0]
    return float(np.median(positive)) if len(positive) else 0.0


def in_units(duration: FloatArray, unit: float) -> FloatArray:
    """Return tau: durations in units of ``unit``, clipped on both sides."""
    with np.errstate(over="ignore"):  # infinity is clipped like all values above the limit
        return np.asarray(np.clip(duration / (unit or 1.0), 1 / LIMIT, LIMIT))
