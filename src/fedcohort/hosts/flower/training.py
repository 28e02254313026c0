"""A cohort's training messages, made by the wrapped strategy, and the bounds that replies are kept within."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedcohort.core.protocol import Cohort, Status
from fedcohort.core.signals import Signal
from fedcohort.hosts.flower.exchange import Outbox, with_ttl
from fedcohort.hosts.flower.replies import Checked, Checker, clip_update, with_common_names, with_weight
from fedcohort.hosts.flower.roster import Card
from fedcohort.hosts.flower.wire import ask_record
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

log = logging.getLogger("flwr.fedcohort")
_OK = Status.OK
_AFTERLIFE = 60.0  # seconds, at least, that a train message outlives its deadline, so that a late answer can arrive


def as_errors(replies: Iterable[Checked], sent: Mapping[str, Message]) -> list[Message]:
    """Return the replies without a sound model as errors, for strategies that judge them.

    Parameters
    ----------
    sent : mapping of str to Message
        The message that each client got.
    """
    found = []
    for reply in replies:
        if reply.status is _OK:
            continue
        if reply.message is not None and reply.message.has_error():
            found.append(reply.message)
        else:
            # A reply that we refuse is to the strategy what an error of the app is.
            error = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reply.reason)
            found.append(Message(error, reply_to=sent[reply.name]))
    return found


class Training:
    """How cohorts of one run are trained.

    Parameters
    ----------
    strategy : Strategy
        The wrapped strategy, whose messages are sent.
    deadline : float
        Seconds after which a round closes.
    max_share : float, optional
        Largest share of a round's weight that one client may have.
    max_update_norm : float, optional
        Longer updates are shortened to this Euclidean norm.
    """

    def __init__(
        self,
        grid: Grid,
        strategy: Strategy,
        deadline: float,
        max_share: float | None = None,
        max_update_norm: float | None = None,
    ) -> None:
        self._grid = grid
        self._strategy = strategy
        self.deadline = deadline
        self._max_share = max_share
        self._max_update_norm = max_update_norm
        self._weight_key, self._config_key = keys(strategy)
        self._records = record_names(strategy)
        self._grows = changes_shape(strategy)
        self.commitment: str | None = None
        self.confirmations: Mapping[str, bytes] = {}
        self.checker: Checker  # of the replies to the messages that were sent last
        self.sent: dict[str, Message] = {}

    def checks(self, arrays: ArrayRecord, required: Iterable[Signal]) -> Checker:
        """Return the checks of replies to ``arrays``."""
        return Checker(arrays, self._weight_key, required, same_shapes=not self._grows)

    def bound(
        self, replies: Iterable[Checked], online: Mapping[str, Card], arrays: ArrayRecord
    ) -> tuple[list[Checked], dict[str, list[str]]]:
        """Return checked replies to ``arrays`` as they may enter an average, and what was changed about each."""
        found, said = self.bound_weights(replies, {name: card.description.size for name, card in online.items()})
        for i, reply in enumerate(found):
            found[i], texts = self.shorten(reply, arrays)
            if texts:
                said.setdefault(reply.name, []).extend(texts)
        return found, said

    def shorten(self, reply: Checked, arrays: ArrayRecord) -> tuple[Checked, list[str]]:
        """Return a checked reply to ``arrays`` whose update is within its bound, and what was changed about it."""
        most = self._max_update_norm
        if most is None or reply.status is not _OK:
            return reply, []
        reply, norm = clip_update(reply, arrays, most)
        return reply, [f"its update of the norm {norm:g} was shortened to {most:g}"] if norm > most else []

    def bound_weights(
        self, replies: Iterable[Checked], sizes: Mapping[str, int | None]
    ) -> tuple[list[Checked], dict[str, list[str]]]:
        """Return checked replies with weights within their bounds, and what was changed about each.

        ``sizes`` are the samples that clients declared, by name.
        """
        # Before weights are bounded: a reply that is refused here must not count among the others.
        found = with_common_names(list(replies), self._records)
        said: dict[str, list[str]] = {}
        weights, lowered = bounded_weights(
            {reply.name: reply.weight for reply in found if reply.status is _OK},
            sizes,
            self._max_share,
        )
        for i, reply in enumerate(found):
            if reply.name in lowered:
                found[i] = with_weight(reply, self._weight_key, weights[reply.name])
                said[reply.name] = [lowered[reply.name]]
        return found, said

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
        report: Iterable[Signal],
    ) -> dict[str, Message]:
        """Return the strategy's own train messages for ``cards``, with what fedcohort adds for each client."""
        nodes = [card.node for card in cards.values()]
        if not nodes:
            return {}
        with taking_all(strategy, len(nodes)):
            written = strategy.configure_train(server_round, arrays, config, GridView(self._grid, nodes))
            messages = messages_by_node(strategy, written, nodes)
        ask = ask_record(report, self.commitment)
        # Equal contents stay one object: Flower then hashes and uploads them once.
        variants: dict[tuple[int, float | None, bool, bytes | None], tuple[RecordDict, RecordDict]] = {}
        found: dict[str, Message] = {}
        for name, card in cards.items():
            message = found[name] = messages[card.node]
            original = message.content
            factor = work.get(name)
            confirmation = self.confirmations.get(name)
            variant = (id(original), factor, card.answers, confirmation)
            known = variants.get(variant)
            if known is None:
                content = RecordDict(dict(original))
                theirs = content.config_records.get(self._config_key, ConfigRecord())
                ours = {SEED: seed} if factor is None else {SEED: seed, WORK: float(factor)}
                # A copy: the strategy keeps writing into its own, while this message is on its way.
                content[self._config_key] = ConfigRecord({**theirs, **ours})
                if card.answers:
                    content[RECORD] = ask if confirmation is None else ConfigRecord({**ask, CONFIRMATION: confirmation})
                # The original is held, or its id could be given out again.
                known = variants[variant] = (original, content)
            message.content = known[1]
        return found

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
        asked: frozenset[Signal],
        commitment: str | None,
        confirmations: Mapping[str, bytes],
    ) -> dict[str, str]:
        """Send a cohort its train messages; return who could not be sent one, and why.

        Parameters
        ----------
        arrays : ArrayRecord
            The global model; replies are checked against it.
        outbox : Outbox
            Takes the messages.
        required, asked : frozenset of Signal
            What a reply must report, and what it is asked to report.
        commitment : str, optional
            To the choice, shown to every client.
        confirmations : mapping of str to bytes
            A key holder's, shown to each client.
        """
        cards = {name: card for name in cohort.names if (card := online.get(name)) is not None}
        reasons = {} if len(cards) == cohort.size else {n: "not online" for n in cohort.names if n not in online}
        work = {} if cohort.work is None else dict(zip(cohort.names, cohort.work.tolist(), strict=True))
        self.commitment, self.confirmations = commitment, confirmations
        self.checker = self.checks(arrays, required)
        self.sent = self.messages(
            self._strategy, cohort.round + 1, cards, arrays, config, seed=seed, work=work, report=asked
        )
        with_ttl(self.sent.values(), self.deadline + max(self.deadline, _AFTERLIFE))
        for name in outbox.send(self.sent):
            reasons[name] = "the SuperLink did not accept the message"
        return reasons
