"""A Flower strategy without rounds: as soon as a client answers or fails, another one takes its place.

It differs from ``CohortStrategy`` in one line::

    strategy = AsyncCohortStrategy("balanced", FedAvg(), busy=30, buffer=10, journal="run.sqlite", seed=1)
    result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=500)
"""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Any

from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedcohort.core.errors import ParameterError
from fedcohort.core.protocol import Selector
from fedcohort.hosts.flow import FlowPolicy
from fedcohort.hosts.flower.flow_run import FlowRun
from fedcohort.hosts.flower.strategy import CohortStrategy, create_part
from fedcohort.hosts.round import Policy
from fedcohort.session.validation import check_one_at_a_time
from fedcohort.training.aggregators import AGGREGATORS, Aggregator, FedAvgStale, WeightedSum

log = logging.getLogger("flwr.fedcohort")
_OF_ROUNDS = {
    "size": "pass busy, the number of clients at work",
    "spares": "a client that fails is replaced at once",
    "min_replies": "pass buffer, the number of answers that make a model",
    "leave_out_slow": "each client has a deadline of its own",
    "late": "an answer counts whenever it comes within the deadline, by its staleness",
}


class AsyncCohortStrategy(CohortStrategy):
    """Choose clients one by one with a fedcohort selector; average their stale updates with any Flower strategy.

    Each of Flower's rounds is one global model: ``num_rounds`` is the number of models, and ``server-round`` in a
    client's config is one more than the number of the model that it is sent.

    Parameters
    ----------
    selector : Selector or str
        One that can choose a single client at a time: ``uniform``, ``balanced``, ``fedcbs`` and others.
    strategy : Strategy
        Any strategy of Flower's message API except those for differential privacy and trees.
    busy : int
        How many clients work at the same time.
    buffer : int
        How many valid answers make a new global model: 1 is FedAsync, more is FedBuff.
    period : float, optional
        Seconds between two models, instead of a number of answers.
    max_answers : int
        How many of as many successive answers as clients are online may be one client's. A client that has given them
        waits.
    aggregator : Aggregator or str
        How much each answer counts, given its staleness: ``fedbuff``, ``fedasync``, ``fedavg-stale``, or your own
        weighted sum with ``discounts_staleness = True``. What its weights lack to 1 is the share of the old model.
    **settings
        As in :class:`CohortStrategy`, except ``filter`` and the policy's ``size``, ``spares``, ``late``,
        ``leave_out_slow`` and ``min_replies``, which only make sense for rounds. Its ``deadline`` is the time one
        client has before another takes its place; with ``"auto"`` it follows, for each client, from how long it and
        others have taken.
    """

    asynchronous = True

    def __init__(
        self,
        selector: Selector[Any] | str,
        strategy: Strategy | None = None,
        *,
        busy: int,
        buffer: int = 1,
        period: float | None = None,
        max_answers: int = 2,
        aggregator: Aggregator | str = "fedbuff",
        **settings: Any,
    ) -> None:
        if "filter" in settings:
            raise ParameterError("Filters compare the models of a round, and there are none.", hint="leave it out")
        self.flow = FlowPolicy(busy, buffer, period, max_answers)
        created = create_part("aggregator", aggregator, Aggregator, AGGREGATORS)
        if not isinstance(created, WeightedSum) or not created.discounts_staleness:
            raise ParameterError(
                "The 'aggregator' parameter of AsyncCohortStrategy must be 'fedbuff', 'fedasync' or 'fedavg-stale', or "
                f"your own weighted sum that discounts stale models. Got {created.name!r}.",
                hint="the wrapped strategy may be FedAdam or another of Flower's strategies",
            )
        self.aggregator = created
        super().__init__(selector, strategy, **settings)
        adds_noise = self.wrapped.private_size is not None
        if adds_noise or self.wrapped.adds_trees:
            raise ParameterError(
                f"{self.wrapped} adds {'noise for a cohort' if adds_noise else 'trees'}, and cannot average updates "
                "of older models.",
                hint="use CohortStrategy, which runs rounds",
            )
        for name, hint in _OF_ROUNDS.items():
            if getattr(self.policy, name) != getattr(Policy(), name):
                raise ParameterError(f"The policy's {name!r} is about rounds, and there are none.", hint=hint)
        # For rules and for the wrapped strategy, a cohort is the clients that work at the same time.
        self.policy = dataclasses.replace(self.policy, size=busy)
        # With fewer clients in a model, one of them would have more than its share.
        min_clients = 1 if self.policy.max_share is None else math.ceil(1 / self.policy.max_share)
        self.flow = dataclasses.replace(self.flow, min_clients=min_clients)
        if period is None and buffer < min_clients:
            share = self.policy.max_share
            raise ParameterError(
                f"max_share={share} needs answers of {min_clients} clients in a model. Got buffer={buffer}.",
                hint=f"pass buffer={min_clients} or more, or a larger max_share",
            )
        check_one_at_a_time(True, self.selector)

    def more_settings(self) -> dict[str, Any]:
        """Return the settings of the flow for the journal."""
        return {**dataclasses.asdict(self.flow), "aggregator": repr(self.aggregator)}

    def _warn_of_bias(self) -> None:
        by_size = isinstance(self.aggregator, FedAvgStale)
        if self.selector.aggregator not in (None, "fedavg" if by_size else "mean"):
            log.warning(
                "the selector %r is unbiased with the aggregator %r; with %r the average may be biased",
                self.selector.name, self.selector.aggregator, self.aggregator.name,
            )  # fmt: skip

    def _run(self, grid: Grid, arrays: ArrayRecord, **options: Any) -> FlowRun:
        return FlowRun(self, grid, arrays, **options)
