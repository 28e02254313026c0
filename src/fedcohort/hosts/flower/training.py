"""A cohort trains: the strategy's own messages out, replies checked, and nobody waited for beyond the deadline."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedcohort.core.protocol import Cohort, Status
from fedcohort.core.signals import Signal
from fedcohort.hosts.flower.exchange import Debts, Outbox, Reply, with_ttl
from fedcohort.hosts.flower.replies import Checked, Checker, agreeing, clipped, with_weight
from fedcohort.hosts.flower.roster import Card
from fedcohort.hosts.flower.weights import bounded_weights
from fedcohort.hosts.flower.wire import CONFIRMATION, RECORD, SEED, WORK, ask_record
from fedcohort.hosts.flower.wrapped_strategy import GridView, addressed, grows, keys, offered, record_names

log = logging.getLogger("flwr.fedcohort")
_OK, _MISSING = Status.OK, Status.MISSING
_AFTERLIFE = 60.0  # seconds, at least, that a train message outlives its deadline, so that a late answer can arrive


@dataclass(frozen=True)
class Trained:
    """What a cohort's training brought.

    Attributes
    ----------
    checked : list of Checked
        The replies in the order of the cohort; who never answered is not among them.
    reasons : dict of str to str
        Why clients without a sound model have none.
    corrections : dict of str to list of str
        What was changed about sound replies before they entered the average.
    sent : dict of str to Message
        The messages that went out.
    """

    checked: list[Checked]
    reasons: dict[str, str]
    corrections: dict[str, list[str]]
    sent: dict[str, Message]

    def errors(self) -> list[Message]:
        """Return the replies without a sound model as errors, for strategies that judge them."""
        found = []
        for reply in self.checked:
            if reply.status is _OK:
                continue
            if reply.message is not None and reply.message.has_error():
                found.append(reply.message)
            else:
                error = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reply.reason)
                found.append(Message(error, reply_to=self.sent[reply.name]))
        return found


class Training:
    """How cohorts of one run are trained.

    Parameters
    ----------
    grid : Grid
    strategy : Strategy
        The wrapped strategy, whose messages are sent.
    deadline : float
        Seconds after which a round closes.
    debts : Debts
        Takes up who has not answered by then.
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
        debts: Debts,
        max_share: float | None = None,
        max_update_norm: float | None = None,
    ) -> None:
        self._grid = grid
        self._strategy = strategy
        self._deadline = deadline
        self._debts = debts
        self._max_share = max_share
        self._max_update_norm = max_update_norm
        self._weight_key, self._config_key = keys(strategy)
        self._records = record_names(strategy)
        self._grows = grows(strategy)
        self.commitment: str | None = None  # told to the clients with every message
        self.confirmations: Mapping[str, bytes] = {}  # of a key holder's, shown to each client with its message

    def checker(self, arrays: ArrayRecord, required: Iterable[Signal]) -> Checker:
        """Return the checks of replies to ``arrays``."""
        return Checker(arrays, self._weight_key, required, same_shapes=not self._grows)

    def bounded(
        self, replies: Iterable[Checked], online: Mapping[str, Card], arrays: ArrayRecord
    ) -> tuple[list[Checked], dict[str, list[str]]]:
        """Return checked replies as they may enter an average, and what was changed about each."""
        found = agreeing(list(replies), self._records)
        said: dict[str, list[str]] = {}
        weights, lowered = bounded_weights(
            {reply.name: reply.weight for reply in found if reply.status is _OK},
            {name: card.description.size for name, card in online.items()},
            self._max_share,
        )
        for i, reply in enumerate(found):
            if reply.name in lowered:
                found[i] = with_weight(reply, self._weight_key, weights[reply.name])
                said[reply.name] = [lowered[reply.name]]
        if (most := self._max_update_norm) is not None:
            for i, reply in enumerate(found):
                if reply.status is _OK:
                    found[i], norm = clipped(reply, arrays, most)
                    if norm > most:
                        said.setdefault(reply.name, []).append(
                            f"its update of the norm {norm:g} was shortened to {most:g}"
                        )
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
        with offered(strategy, len(nodes)):
            written = strategy.configure_train(server_round, arrays, config, GridView(self._grid, nodes))
            messages = addressed(strategy, written, nodes)
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
                # A copy: the strategy goes on writing into its own, while this message is on its way.
                content[self._config_key] = ConfigRecord({**theirs, **ours})
                if card.answers:
                    content[RECORD] = ask if confirmation is None else ConfigRecord({**ask, CONFIRMATION: confirmation})
                # The original is held, or its id could be given out again.
                known = variants[variant] = (original, content)
            message.content = known[1]
        return found

    def train(
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
        enough: int,
    ) -> Trained:
        """Train a cohort; closes with ``enough`` sound models, or at the deadline."""
        cards = {name: card for name in cohort.names if (card := online.get(name)) is not None}
        reasons = {} if len(cards) == cohort.size else {n: "not online" for n in cohort.names if n not in online}
        work = {} if cohort.work is None else dict(zip(cohort.names, cohort.work.tolist(), strict=True))
        messages = self.messages(
            self._strategy, cohort.round + 1, cards, arrays, config, seed=seed, work=work, report=asked
        )
        with_ttl(messages.values(), self._deadline + max(self._deadline, _AFTERLIFE))
        for name in outbox.send(messages):
            reasons[name] = "the SuperLink did not take the message"
        checker = self.checker(arrays, required)
        checked: dict[str, Checked] = {}
        seen = sound = 0

        def done(replies: Sequence[Reply]) -> bool:
            nonlocal seen, sound
            for result in checker.all(replies[seen:]):
                checked[result.name] = result
                sound += result.status is _OK
            seen = len(replies)
            return sound >= enough

        begun = outbox.clock()
        done(outbox.gather(self._deadline, done))
        if outbox.waiting:
            closed = outbox.clock() - begun >= self._deadline
            why = f"no answer within {self._deadline:g} s" if closed else "the round was closed with enough others"
            reasons.update(dict.fromkeys(outbox.owing(), why))
            self._debts.add(outbox, {name: card.node for name, card in cards.items()}, cohort.ticket, cohort.round)
        # What was lost on the way counts as never answered; the session knows those by their absence.
        if sound < len(checked):
            reasons.update({c.name: c.reason for c in checked.values() if c.status is _MISSING})
        answered = [c for c in map(checked.get, cohort.names) if c is not None and c.status is not _MISSING]
        ordered, corrections = self.bounded(answered, online, arrays)
        failed = {reply.name: reply.reason for reply in ordered if reply.status is not _OK}
        reasons.update(failed)
        log.info("sound models: %d, clients without one: %d", len(ordered) - len(failed), len(reasons))
        return Trained(ordered, reasons, corrections, messages)
