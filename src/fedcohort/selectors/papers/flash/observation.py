r"""What a round's outcome says about the contexts and rewards of FLASH (Algorithm 1, lines 7 to 9).

.. [Chang2024] X. Chang et al., "FLASH: Federated Learning Across Simultaneous Heterogeneities", arXiv:2402.08769, 2024.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.protocol import Outcome
from fedcohort.core.signals import Signal
from fedcohort.selectors.papers.flash.context import LOSS_OF, State, contexts, in_units, time_unit, with_losses
from fedcohort.selectors.papers.flash.reward import Reading, rate


class Observation(NamedTuple):
    """The clients of a round that the bandit can learn from."""

    clients: IntArray  # (k,)
    context: FloatArray  # (k, d) the contexts they were picked by
    before: FloatArray  # (k,) the reward's loss of the received model
    rewards: FloatArray | None  # (k,) None while they wait for the next global model


def observed_round(
    state: State, outcome: Outcome, elements: Sequence[str], reading: Reading, *, losses: bool = True
) -> tuple[State, Observation]:
    """Return the state with the contexts after a round, and what was observed; the caller enters the rewards.

    Parameters
    ----------
    state : ContextState
    outcome : Outcome
    elements : sequence of str
        Elements of the context.
    reading : Reading
        Of the reward.
    losses : bool
        Whether the contexts' losses are those in the reports; otherwise a query before the round asks for them.
    """
    duration = outcome[Signal.DURATION]
    usable = outcome.ok & np.isfinite(duration) & np.isfinite(outcome[reading.before])
    if reading.after is not None:
        usable &= np.isfinite(outcome[reading.after])
    clients = outcome.clients[usable]
    unit = state.time_unit or time_unit(duration[usable])
    tau = in_units(duration[usable], unit)
    context = contexts(state, elements, clients)
    if losses:
        reported = {s: outcome[s][usable] for name, s in LOSS_OF.items() if name in elements}
        state = with_losses(state, clients, reported)
    durations, level = state.duration.copy(), state.level.copy()
    before = outcome[reading.before][usable]
    durations[clients], level[clients] = tau, before
    rewards, rewarded = state.reward.copy(), state.rewarded.copy()
    rewards[outcome.clients[~usable]] = 0.0
    rewarded[outcome.clients] = True
    state = dataclasses.replace(
        state,
        duration=durations,
        level=level,
        reward=rewards,
        rewarded=rewarded,
        rounds=state.rounds + 1,
        time_unit=unit,
    )
    if reading.after is None:
        return state, Observation(clients, context, before, None)
    after = outcome[reading.after][usable]
    return state, Observation(clients, context, before, rate(reading, before, after, tau, state.usual))
