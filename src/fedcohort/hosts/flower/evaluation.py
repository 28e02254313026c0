"""Evaluation of the global model, at the server and on clients; failures of clients are left out."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord

from fedcohort.core import rng as streams
from fedcohort.hosts.flower.averaging import error_text
from fedcohort.hosts.flower.exchange import Outbox, exchange, with_ttl
from fedcohort.hosts.flower.replies import evaluations
from fedcohort.hosts.flower.roster import Card
from fedcohort.hosts.flower.wrapped_strategy import GridView, sample_size, taking_all

if TYPE_CHECKING:
    from fedcohort.hosts.flower.host import FlowerHost

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
    config : ConfigRecord
        Sent to the clients.
    function : callable or None
        Evaluates at the server.
    """

    def __init__(self, host: FlowerHost, config: ConfigRecord, function: EvaluateFn | None) -> None:
        self._host = host
        self._config = config
        self._function = function

    def at_server(self, server_round: int, arrays: ArrayRecord) -> dict[str, float]:
        """Return the numbers of the server's own evaluation."""
        if self._function is None:
            return {}
        metrics = self._function(server_round, arrays)
        log.info("\t└──> Global evaluation: %s", metrics)
        if metrics is not None:
            self._host.result.evaluate_metrics_serverapp[server_round] = metrics
        return scalars(metrics)

    def on_clients(
        self, server_round: int, arrays: ArrayRecord, online: Mapping[str, Card], outbox: Outbox
    ) -> tuple[dict[str, float], dict[str, list[str]]]:
        """Return the averaged numbers of clients, drawn among those that are free, and the corrections by client."""
        chosen = self._draw(server_round, online)
        if not chosen:
            return {}, {}
        messages = self._messages(server_round, arrays, chosen)
        replies = exchange(outbox, messages, self._host.deadline, self._host.outstanding)
        valid = {}
        for name in messages:
            reply = replies.get(name)
            if reply is None or reply.error is not None:
                log.info("\t> %s did not evaluate: %s", name, "no answer" if reply is None else reply.error)
            else:
                valid[name] = reply.message
        sizes = {name: chosen[name].description.size for name in valid}
        usable, corrections = evaluations(valid, self._host.weight_key, sizes, self._host.policy.max_share)
        metrics: MetricRecord | None = None
        try:
            if usable:
                metrics = self._host.inner.aggregate_evaluate(server_round, usable)
        except Exception as error:  # it must not end the run, because evaluation changes no model
            log.warning("the evaluation of round %d failed and is left out: %s", server_round - 1, error_text(error))
            log.debug("the evaluation failed", exc_info=True)
        if metrics is not None:
            log.info("\t└──> Aggregated evaluation: %s", metrics)
            self._host.result.evaluate_metrics_clientapp[server_round] = metrics
        return {f"evaluate/{key}": value for key, value in scalars(metrics).items()}, corrections

    def _draw(self, server_round: int, online: Mapping[str, Card]) -> dict[str, Card]:
        """Return as many clients as the strategy wants, drawn among those that are free."""
        if sample_size(self._host.levels, "evaluate", 1) == 0:
            return {}
        free = {name: card for name, card in online.items() if not self._host.outstanding.busy(name, card.node)}
        count = sample_size(self._host.levels, "evaluate", len(free))
        if count is None or count >= len(free):
            return free
        names = list(free)
        # By round and seed, so that a resumed run evaluates on the same clients.
        draw = streams.stream(self._host.settings.seed, _EVALUATION, server_round - 1)
        return {names[int(i)]: free[names[int(i)]] for i in np.sort(draw.choice(len(names), count, replace=False))}

    def _messages(self, server_round: int, arrays: ArrayRecord, chosen: Mapping[str, Card]) -> dict[str, Message]:
        """Return the strategy's own messages, which may go to fewer clients than ``chosen``."""
        nodes = [card.node for card in chosen.values()]
        with taking_all(self._host.inner, len(nodes)):
            view = GridView(self._host.grid, nodes)
            # The strategy must find what it wrote last time. A copy protects messages that are still on their way.
            self._config = ConfigRecord(dict(self._config))
            written = self._host.inner.configure_evaluate(server_round, arrays, self._config, view)
            by_node = {message.metadata.dst_node_id: message for message in written}
        messages = {name: by_node[card.node] for name, card in chosen.items() if card.node in by_node}
        with_ttl(messages.values(), 2 * self._host.deadline)
        return messages
