"""A cohort's training messages, made by the wrapped strategy, and the bounds for replies."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp.strategy import Strategy

from fedcohort.core.protocol import Cohort, Status
from fedcohort.core.signals import Signal
from fedcohort.hosts.flower.exchange import Outbox, with_ttl
from fedcohort.hosts.flower.replies import CheckedMessage, Checker, clip_update, with_common_names, with_weight
from fedcohort.hosts.flower.roster import Card
from fedcohort.hosts.flower.wrapped_strategy import (
    GridView,
    changes_shape,
    keys,
    messages_by_node,
    record_names,
    taking_all,
)
from fedcohort.hosts.weights import bounded_weights
from fedcohort.hosts.wire import CONFIRMATION, RECORD, SEED, WORK

if TYPE_CHECKING:
    from fedcohort.hosts.flower.host import FlowerHost

log = logging.getLogger("flwr.fedcohort")
_OK = Status.OK
LATE_GRACE_SECONDS = 60.0  # seconds, at least, between a train message's deadline and its end, for late answers


def as_errors(replies: Iterable[CheckedMessage], sent: Mapping[str, Message]) -> list[Message]:
    """Return the replies without a valid model as errors, for strategies that count them.

    Parameters
    ----------
    sent : mapping of str to Message
        The message that each client got.
    """
    errors = []
    for reply in replies:
        if reply.status is _OK:
            continue
        if reply.message is not None and reply.message.has_error():
            errors.append(reply.message)
        else:
            # For the strategy, a reply that we refuse is an error of the app.
            error = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reply.reason)
            errors.append(Message(error, reply_to=sent[reply.name]))
    return errors


class Training:
    """Sends the training messages of a run and bounds the replies."""

    def __init__(self, host: FlowerHost) -> None:
        self._host = host
        self._config_key = keys(host.inner)[1]
        self._records = record_names(host.inner)
        self._grows = changes_shape(host.inner)
        self.checker: Checker  # of the replies to the messages that were sent last
        self.sent: dict[str, Message] = {}

    def checks(self, arrays: ArrayRecord, required: Iterable[Signal]) -> Checker:
        """Return the checks of replies to ``arrays``."""
        return Checker(arrays, self._host.weight_key, required, same_shapes=not self._grows)

    def bound(
        self, replies: Iterable[CheckedMessage], online: Mapping[str, Card], arrays: ArrayRecord
    ) -> tuple[list[CheckedMessage], dict[str, list[str]]]:
        """Return checked replies to ``arrays`` within all bounds, and the corrections by client."""
        sizes = {name: card.description.size for name, card in online.items()}
        bounded, corrections = self.bound_weights(replies, sizes, self._host.policy.max_share)
        # After the weights, so that a refused reply is not shortened for nothing.
        for i, reply in enumerate(bounded):
            bounded[i], texts = self.shorten(reply, arrays)
            if texts:
                corrections.setdefault(reply.name, []).extend(texts)
        return bounded, corrections

    def shorten(self, reply: CheckedMessage, arrays: ArrayRecord) -> tuple[CheckedMessage, list[str]]:
        """Return a checked reply to ``arrays`` with its update within the norm, and the corrections."""
        most = self._host.policy.max_update_norm
        if most is None or reply.status is not _OK:
            return reply, []
        reply, norm = clip_update(reply, arrays, most)
        return reply, [f"its update of norm {norm:g} was shortened to {most:g}"] if norm > most else []

    def bound_weights(
        self, replies: Iterable[CheckedMessage], sizes: Mapping[str, int | None], max_share: float | None
    ) -> tuple[list[CheckedMessage], dict[str, list[str]]]:
        """Return checked replies with weights within their bounds, and the corrections by client.

        ``sizes`` are the numbers of samples that clients declared.
        """
        # First, because the weights of replies that are refused here must not influence the bounds.
        bounded = with_common_names(list(replies), self._records)
        corrections: dict[str, list[str]] = {}
        sent_weights = {reply.name: reply.weight for reply in bounded if reply.status is _OK}
        weights, lowered = bounded_weights(sent_weights, sizes, max_share)
        for i, reply in enumerate(bounded):
            if reply.name in lowered:
                bounded[i] = with_weight(reply, self._host.weight_key, weights[reply.name])
                corrections[reply.name] = [lowered[reply.name]]
        return bounded, corrections

    def messages(
        self,
        strategy: Strategy,
        server_round: int,
        cards: Mapping[str, Card],
        arrays: ArrayRecord,
        config: ConfigRecord,
        *,
        seed: int,
        work: Mapping[str, float],
        ask: Mapping[str, Any],
        confirmations: Mapping[str, bytes],
    ) -> dict[str, Message]:
        """Return the strategy's own train messages for ``cards``, with fedcohort's additions for each client.

        ``ask`` is the :func:`~fedcohort.hosts.wire.question` for clients that answer; the others are as in
        :meth:`send`.
        """
        nodes = [card.node for card in cards.values()]
        if not nodes:
            return {}
        with taking_all(strategy, len(nodes)):
            written = strategy.configure_train(server_round, arrays, config, GridView(self._host.grid, nodes))
            messages = messages_by_node(strategy, written, nodes)
        record = ConfigRecord(dict(ask))
        # Equal contents share one object, which Flower then hashes and uploads only once.
        variants: dict[tuple[int, float | None, bool, bytes | None], tuple[RecordDict, RecordDict]] = {}
        by_name: dict[str, Message] = {}
        for name, card in cards.items():
            message = by_name[name] = messages[card.node]
            original = message.content
            factor = work.get(name)
            confirmation = confirmations.get(name)
            variant = (id(original), factor, card.answers, confirmation)
            known = variants.get(variant)
            if known is None:
                content = RecordDict(dict(original))
                client_config = content.config_records.get(self._config_key, ConfigRecord())
                ours = {SEED: seed} if factor is None else {SEED: seed, WORK: float(factor)}
                # A copy, because the strategy may write into its config while this message is on its way.
                content[self._config_key] = ConfigRecord({**client_config, **ours})
                if card.answers:
                    confirmed = {**ask, CONFIRMATION: confirmation}
                    content[RECORD] = record if confirmation is None else ConfigRecord(confirmed)
                # The original must stay alive, or its id could be used again.
                known = variants[variant] = (original, content)
            message.content = known[1]
        return by_name

    def send(
        self,
        cohort: Cohort,
        online: Mapping[str, Card],
        arrays: ArrayRecord,
        config: ConfigRecord,
        outbox: Outbox,
        *,
        seed: int,
        required: frozenset[Signal],
        ask: Mapping[str, Any],
        confirmations: Mapping[str, bytes],
    ) -> dict[str, str]:
        """Send a cohort its train messages; return the clients that could not be sent one, with the reasons.

        Parameters
        ----------
        arrays : ArrayRecord
            The global model; replies are checked against it.
        outbox : Outbox
            Sends the messages.
        required : frozenset of Signal
            What a reply must report.
        ask : mapping
            The question for every client: what to report, and the server's commitment to the choice.
        confirmations : mapping of str to bytes
            By client, the key holder's confirmation for it.
        """
        cards = {name: card for name in cohort.names if (card := online.get(name)) is not None}
        reasons = {} if len(cards) == cohort.size else {n: "not online" for n in cohort.names if n not in online}
        work = {} if cohort.work is None else dict(zip(cohort.names, cohort.work.tolist(), strict=True))
        self.checker = self.checks(arrays, required)
        self.sent = self.messages(
            self._host.inner,
            cohort.round + 1,
            cards,
            arrays,
            config,
            seed=seed,
            work=work,
            ask=ask,
            confirmations=confirmations,
        )
        with_ttl(self.sent.values(), self._host.deadline + max(self._host.deadline, LATE_GRACE_SECONDS))
        for name in outbox.send(self.sent):
            reasons[name] = "the SuperLink did not accept the message"
        return reasons
