"""Evaluation of the global model, at the server and on clients; failures of clients are left out."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedcohort.core import rng as streams
from fedcohort.hosts.flower.averaging import error_text
from fedcohort.hosts.flower.exchange import Outbox, OutstandingReplies, exchange, with_ttl
from fedcohort.hosts.flower.replies import evaluations
from fedcohort.hosts.flower.roster import Card
from fedcohort.hosts.flower.wrapped_strategy import GridView, keys, levels, sample_size, taking_all

log = logging.getLogger("flwr.fedcohort")
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]  # evaluates the model of a round at the server
_EVALUATION = "evaluation"  # the random stream for the choice of evaluating clients


def scalars(metrics: MetricRecord | None) -> dict[str, float]:
    """Return the finite single numbers of a record."""
    return {k: float(v) for k, v in (metrics or {}).items() if isinstance(v, (int, float)) and math.isfinite(v)}


class Evaluation:
    """How the models of one run are evaluated.

    Parameters
    ----------
    strategy : Strategy
        The wrapped strategy, which decides how many clients evaluate and averages their metrics.
    config : ConfigRecord
        Sent to the clients.
    function : callable or None
        Evaluates at the server.
    result : Result
        Collects the metrics.
    seed : int
        For the choice of clients.
    deadline : float
        Seconds that clients have.
    outstanding : OutstandingReplies
        Collects the clients that have not answered by then.
    max_share : float, optional
        Largest share of the weights that one client may have.
    """

    def __init__(
        self,
        grid: Grid,
        strategy: Strategy,
        config: ConfigRecord,
        function: EvaluateFn | None,
        result: Result,
        *,
        seed: int,
        deadline: float,
        outstanding: OutstandingReplies,
        max_share: float | None = None,
    ) -> None:
        self._grid = grid
        self._strategy = strategy
        self._config = config
        self._function = function
        self._result = result
        self._seed = seed
        self._deadline = deadline
        self._outstanding = outstanding
        self._max_share = max_share
        self._levels = levels(strategy)
        self._weight_key, _ = keys(strategy)

    def at_server(self, server_round: int, arrays: ArrayRecord) -> dict[str, float]:
        """Return the numbers of the server's own evaluation."""
        if self._function is None:
            return {}
        metrics = self._function(server_round, arrays)
        log.info("\t└──> Global evaluation: %s", metrics)
        if metrics is not None:
            self._result.evaluate_metrics_serverapp[server_round] = metrics
        return scalars(metrics)

    def on_clients(
        self, server_round: int, arrays: ArrayRecord, online: Mapping[str, Card], outbox: Outbox
    ) -> tuple[dict[str, float], dict[str, list[str]]]:
        """Return the averaged numbers of clients, drawn among those that are free, and the corrections by client."""
        chosen = self._draw(server_round, online)
        if not chosen:
            return {}, {}
        messages = self._messages(server_round, arrays, chosen)
        replies = exchange(outbox, messages, self._deadline, self._outstanding)
        valid = {}
        for name in messages:
            reply = replies.get(name)
            if reply is None or reply.error is not None:
                log.info("\t> %s did not evaluate: %s", name, "no answer" if reply is None else reply.error)
            else:
                valid[name] = reply.message
        sizes = {name: chosen[name].description.size for name in valid}
        usable, corrections = evaluations(valid, self._weight_key, sizes, self._max_share)
        metrics: MetricRecord | None = None
        try:
            if usable:
                metrics = self._strategy.aggregate_evaluate(server_round, usable)
        except Exception as error:  # it must not end the run, because evaluation changes no model
            log.warning("the evaluation of round %d failed and is left out: %s", server_round - 1, error_text(error))
            log.debug("the evaluation failed", exc_info=True)
        if metrics is not None:
            log.info("\t└──> Aggregated evaluation: %s", metrics)
            self._result.evaluate_metrics_clientapp[server_round] = metrics
        return {f"evaluate/{key}": value for key, value in scalars(metrics).items()}, corrections

    def _draw(self, server_round: int, online: Mapping[str, Card]) -> dict[str, Card]:
        """Return as many clients as the strategy wants, drawn among those that are free."""
        if sample_size(self._levels, "evaluate", 1) == 0:
            return {}
        free = {name: card for name, card in online.items() if not self._outstanding.busy(name, card.node)}
        count = sample_size(self._levels, "evaluate", len(free))
        if count is None or count >= len(free):
            return free
        names = list(free)
        # By round and seed, so that a resumed run evaluates on the same clients.
        draw = streams.stream(self._seed, _EVALUATION, server_round - 1)
        return {names[int(i)]: free[names[int(i)]] for i in np.sort(draw.choice(len(names), count, replace=False))}

    def _messages(self, server_round: int, arrays: ArrayRecord, chosen: Mapping[str, Card]) -> dict[str, Message]:
        """Return the strategy's own messages, which may go to fewer clients than ``chosen``."""
        nodes = [card.node for card in chosen.values()]
        with taking_all(self._strategy, len(nodes)):
            view = GridView(self._grid, nodes)
            # The strategy must find what it wrote last time. A copy protects messages that are still on their way.
            self._config = ConfigRecord(dict(self._config))
            written = self._strategy.configure_evaluate(server_round, arrays, self._config, view)
            by_node = {message.metadata.dst_node_id: message for message in written}
        messages = {name: by_node[card.node] for name, card in chosen.items() if card.node in by_node}
        with_ttl(messages.values(), 2 * self._deadline)
        return messages
