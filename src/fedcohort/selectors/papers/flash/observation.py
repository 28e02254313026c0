r"""What a round's outcome says about the contexts and rewards of FLASH (Algorithm 1, lines 7 to 9).

.. [Chang2024] X. Chang et al., "FLASH: Federated Learning Across Simultaneous Heterogeneities", arXiv:2402.08769, 2024.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedcohort.core.arrays import FloatArray, IntArray, sealed
from fedcohort.core.protocol import Outcome
from fedcohort.core.signals import Signal
from fedcohort.selectors.papers.flash.context import LOSS_OF, State, contexts, in_units, time_unit, with_losses
from fedcohort.selectors.papers.flash.reward import Reading, rate


class Observation(NamedTuple):
    """The clients of a round from which something can be learnt."""

    who: IntArray  # (k,)
    context: FloatArray  # (k, d) what they were picked by
    before: FloatArray  # (k,) the reward's loss of the received model
    rewards: FloatArray | None  # (k,) None when they wait for the next global model


def observed_round(
    state: State, outcome: Outcome, elements: Sequence[str], reading: Reading, *, losses: bool = True
) -> tuple[State, Observation]:
    """Return the state with the contexts after a round, and what was observed; rewards are not yet in the state.

    Parameters
    ----------
    state : ContextState
    outcome : Outcome
    elements : sequence of str
        Elements of the context.
    reading : Reading
        Of the reward.
    losses : bool
        Whether the contexts' losses are those reported; else they are asked for.
    """
    duration = outcome[Signal.DURATION]
    usable = outcome.ok & np.isfinite(duration) & np.isfinite(outcome[reading.before])
    if reading.after is not None:
        usable &= np.isfinite(outcome[reading.after])
    who = outcome.clients[usable]
    unit = state.time_unit or time_unit(duration[usable])
    tau = in_units(duration[usable], unit)
    context = contexts(state, elements, who)
    if losses:
        reported = {s: outcome[s][usable] for name, s in LOSS_OF.items() if name in elements}
        state = with_losses(state, who, reported)
    durations, level = state.duration.copy(), state.level.copy()
    before = outcome[reading.before][usable]
    durations[who], level[who] = tau, before
    rewards, rewarded = state.reward.copy(), state.rewarded.copy()
    rewards[outcome.clients[~usable]] = 0.0
    rewarded[outcome.clients] = True
    state = dataclasses.replace(
        state,
        duration=sealed(durations),
        level=sealed(level),
        reward=sealed(rewards),
        rewarded=sealed(rewarded),
        rounds=state.rounds + 1,
        time_unit=unit,
    )
    if reading.after is None:
        return state, Observation(who, context, before, None)
    after = outcome[reading.after][usable]
    return state, Observation(who, context, before, rate(reading, before, after, tau, state.usual))
