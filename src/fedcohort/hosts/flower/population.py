"""The clients of a live federation as a session needs them: a table, newcomers, who is available, answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.clients import ClientTable, LabelCounts, LabelGramRows, LabelInfo
from fedcohort.core.errors import FedcohortError, InputError, KeyHolderError, SignalError
from fedcohort.core.protocol import Losses
from fedcohort.core.signals import TABLE_SIGNALS, Signal
from fedcohort.core.text import natural, shorten
from fedcohort.hosts.flower.exchange import Debts, Outbox, exchange
from fedcohort.hosts.flower.roster import Card, Roster
from fedcohort.hosts.flower.wire import LOSSES, ask_record
from fedcohort.hosts.questions import read_losses
from fedcohort.hosts.round import FederationTimeoutError, join_names
from fedcohort.hosts.wire import RECORD, Description, most_classes
from fedcohort.journal import read_journal
from fedcohort.journal.events import REGISTERED
from fedcohort.privacy.label_decoders import ClientRefusedError, LabelDecoder
from fedcohort.session.rules import Rules

if TYPE_CHECKING:
    from fedcohort.session.session import Session

log = logging.getLogger("flwr.fedcohort")
_SETTLE = 15.0  # seconds given to nodes that have not described themselves, once enough others have
_LOOK_EVERY = 0.25  # seconds between two looks at who is there
_ARRAYS = "arrays"
_LABELS = frozenset({Signal.LABEL_COUNTS, Signal.LABEL_PRODUCTS})


_Version = tuple[int, int]


def facts_in(journal: Path) -> frozenset[Signal]:
    """Return which kinds of facts about clients a journal holds."""
    with closing(read_journal(journal)) as record:
        return record.table()[0].signals


def rules_in(journal: Path) -> Rules | None:
    """Return the rules in force in a journal."""
    with closing(read_journal(journal)) as record:
        found = record.meta().get("rules")
    return None if found is None else Rules.from_journal(found)


class Population:
    """The clients behind a grid.

    Parameters
    ----------
    required : set of Signal
        What the selector and its shadows must be able to know about a client.
    patience : float
        Longest time to wait for clients to come online, in seconds.
    labels : LabelDecoder, optional
        Turns what clients send about their labels, sealed, into something a selector can use.
    describe_every : float, optional
        Seconds after which a client is asked again what it holds. Default: only when it connects.
    classes : int, optional
        How many classes there are. Default: what clients agree on, see :meth:`most_classes`.
    waits : callable, optional
        Called with what is being waited for, as long as that lasts.
    registered_only : bool
        Whether only nodes take part whose name the SuperLink binds to their key.
    """

    def __init__(
        self,
        grid: Grid,
        required: Iterable[Signal],
        *,
        patience: float,
        labels: LabelDecoder | None = None,
        describe_every: float | None = None,
        classes: int | None = None,
        registered_only: bool = False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        waits: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.grid = grid
        self.clock = clock
        self.sleep = sleep
        self.classes = classes  # None until a table has labels
        self._waits = waits
        self._required = frozenset(required)
        self._patience = patience
        self._labels = labels
        self._registered_only = registered_only
        self._checked: dict[str, tuple[bytes, str | None]] = {}  # sealed labels, and why they cannot be used
        self._roster = Roster.of(grid, clock, sleep)
        self._roster.describe_every = describe_every
        self.debts = Debts()
        self._refused: set[str] = set()  # who could not join
        self._unfit: dict[str, str] = {}  # who takes no part, and why, as it was last logged
        self._impostors: set[int] = set()
        self._keyed: frozenset[str] | None = None  # names that were ever bound to a key, by the journal
        self._facts: dict[str, Description] = {}  # what the table says about each, as it was described
        self._demands = 0  # raised whenever something but the roster changes who is fit
        self._fit_at: _Version | None = None  # of the roster and the demands that `_fit` was worked out from
        self._fit: dict[str, Card] = {}
        self._supplied: frozenset[Signal] | None = None
        # What does not change between rounds is worked out once; a federation may have many thousand clients.
        self._welcomed: tuple[_Version, int] | None = None
        self._free: tuple[tuple[_Version, int], IntArray] | None = None

    @property
    def online(self) -> dict[str, Card]:
        """The clients that are online and can tell what is required, by name in natural order."""
        at = self._version
        # Asked for many times in a round, and the answer is the same until somebody comes, goes or says something new.
        if at == self._fit_at:
            return self._fit
        most = self.most_classes()
        fit: dict[str, Card] = {}
        unfit: dict[str, str] = {}
        for name, card in self._admitted_cards.items():
            why = self._flaw(card, most)
            if why is not None:
                unfit[name] = why
            elif self._keyed and name in self._keyed and not card.registered:
                if card.node not in self._impostors:
                    self._impostors.add(card.node)
                    log.warning("node %d takes no part: %r is the name of a registered node", card.node, name)
            else:
                fit[name] = card
        self._log_unfit(unfit)
        self._unfit = unfit
        self._fit_at, self._fit, self._supplied = at, fit, None
        return fit

    def _log_unfit(self, unfit: Mapping[str, str]) -> None:
        """Log who takes no part, and why; what was logged before is not repeated."""
        news: dict[str, list[str]] = {}
        for name, why in unfit.items():
            if self._unfit.get(name) != why:
                news.setdefault(why, []).append(name)
        for why, (first, *rest) in news.items():  # a fault that all of them share is logged once
            more = f" (the same holds for {join_names(rest)})" if rest else ""
            log.warning("client %r takes no part: %s%s", first, why, more)

    def _flaw(self, card: Card, classes: int | None) -> str | None:
        """Return why a client cannot take part, as far as can be told without opening its labels, or None."""
        lacking = card.lacks(self._required, self._labels_are_sealed)
        if self._labels is None and self._required & _LABELS:
            flaw = _flaw(card, classes)
            if flaw is not None:
                return flaw
        if self._labels is not None and card.description.sealed_labels is not None:
            # Checking a signature takes long; what was checked once is not checked again.
            sealed, flaw = self._checked.get(card.name, (None, None))
            if sealed != card.description.sealed_labels:
                flaw = self._check(self._labels, card.name, card.description.sealed_labels)
            if flaw is not None:
                return flaw
        return f"it cannot supply {', '.join(repr(s.value) for s in lacking)}" if lacking else None

    def _check(self, opener: LabelDecoder, client: str, sealed: bytes) -> str | None:
        """Return why sealed labels cannot be used, as far as can be told without opening them, or None."""
        try:
            opener.check(client, sealed)
        except FedcohortError as error:
            self._checked[client] = (sealed, shorten(error.message))
        else:
            self._checked[client] = (sealed, None)
        return self._checked[client][1]

    def most_classes(self) -> int | None:
        """Return how many classes a client may name; None where nobody names any.

        The operator's number, or that of the journal; before there is one, what clients agree on.
        """
        if self.classes is not None:
            return self.classes
        described = (card.description.label_counts for card in self._admitted_cards.values())
        return most_classes(len(counts) for counts in described if counts is not None)

    def adopt(self, table: ClientTable) -> None:
        """Hold clients from now on to the number of classes that a session's table has."""
        if Signal.LABEL_COUNTS not in table.signals:
            return
        width = table.label_counts.shape[1]
        if self.classes not in (None, width):
            raise InputError(
                f"The federation on record has {width} classes. Got classes={self.classes}.",
                hint=f"pass classes={width} or leave it out, or start a new journal",
            )
        self.classes = width
        self._demands += 1

    @property
    def _admitted_cards(self) -> dict[str, Card]:
        """The clients that have described themselves and may take part under their names."""
        everyone = self._roster.online
        if not self._registered_only:
            return everyone
        for card in everyone.values():
            if not card.registered and card.node not in self._impostors:
                self._impostors.add(card.node)
                log.warning("node %d takes no part: %r is not a registered name", card.node, card.name)
        return {name: card for name, card in everyone.items() if card.registered}

    @property
    def _version(self) -> _Version:
        return self._roster.version, self._demands

    def refresh(self) -> None:
        """Look who is online now."""
        self._roster.refresh()

    def assemble(self, count: int) -> None:
        """Wait until ``count`` clients are online and have described themselves."""
        begun = self.clock()
        enough_since: float | None = None
        logged = begun
        while True:
            self.refresh()
            online = self.online
            now = self.clock()
            if len(online) >= count:
                enough_since = now if enough_since is None else enough_since
                # A silent node keeps the others waiting for a while, but never ends the run.
                if not self._roster.unanswered or now - enough_since > _SETTLE or now - begun > self._patience:
                    return
            if now - begun > self._patience:
                raise self._too_few(count)
            self._waits(self._waiting_text(count))
            if now - logged > 10:
                logged = now
                log.info("waiting: %s", self._waiting_text(count))
            self.sleep(_LOOK_EVERY)

    def _waiting_text(self, count: int) -> str:
        """Return in words what keeps a run from beginning."""
        online = len(self.online)
        if online < count:
            return "; ".join([f"{online} of the {count} clients needed are there", *self.absent()])
        longest, silent = min(_SETTLE, self._patience), join_names(self._roster.silent)
        waits = f"at most {longest:g} s for nodes that have not said who they are: {silent}"
        return f"{online} clients are there, {count} are needed; {waits}"

    def absent(self) -> list[str]:
        """Return in words who is connected and cannot take part, and why."""
        found: dict[str, list[str]] = {}
        online, named = self.online, self._admitted_cards
        for name in self._roster.online:
            if name not in online:
                why = self._unfit.get(name, "refused")
                if name not in named:
                    why = "not registered under a name (registered_only=True)"
                found.setdefault(why, []).append(name)
        if self._roster.silent:
            found["have not said who they are"] = self._roster.silent
        return [f"{why.rstrip('.')}: {join_names(names)}" for why, names in found.items()]

    def _too_few(self, count: int) -> FedcohortError:
        """Return the error of a run that cannot begin, with what keeps clients from taking part."""
        online = self.online
        waited = (
            f"Waited {self._patience:g} s for {count} clients; {len(online)} are there "
            f"({', '.join(list(online)[:10]) or 'none'}), "
            f"{'; '.join([f'{self._roster.nodes} nodes are online', *self.absent()])}."
        )
        everyone = self._admitted_cards.items()
        lacking = {
            s
            for name, card in everyone
            if name not in online
            for s in card.lacks(self._required, self._labels_are_sealed)
        }
        if lacking:
            meant = ", ".join(f"{s.value!r} is {s.meaning}" for s in sorted(lacking))
            return SignalError(
                f"{waited} ({meant}.)",
                hint="wrap the ClientApp with fedcohort.flower.cohort_client and give it the Answers that are missing",
            )
        return FederationTimeoutError(
            waited, hint="start more SuperNodes, lower min_available_nodes or wait_for, or raise patience"
        )

    @property
    def _labels_are_sealed(self) -> bool:
        return self._labels is not None

    # -- the table ------------------------------------------------------------------------------------------------

    def require(self, signals: frozenset[Signal]) -> None:
        """Admit from now on only clients about whom these can be known too."""
        if not signals <= self._required:
            self._required |= signals
            self._demands += 1

    def known_signals(self) -> frozenset[Signal]:
        """Return what can be known about every client that is online."""
        signals = [card.signals(self._labels_are_sealed) for card in self.online.values()]
        return frozenset.intersection(*signals) if signals else frozenset()

    def partly_supplied(self, signals: Iterable[Signal]) -> dict[Signal, list[str]]:
        """Return which of ``signals`` some who are online can supply and others cannot, with the others' names."""
        cards = self.online.items()
        known = {name: card.signals(self._labels is not None) for name, card in cards}
        lacking = {signal: [name for name in known if signal not in known[name]] for signal in sorted(signals)}
        return {signal: names for signal, names in lacking.items() if 0 < len(names) < len(known)}

    def supplied_signals(self) -> frozenset[Signal]:
        """Return what every client that is online can report or answer."""
        if self._supplied is None:
            self._supplied = self.known_signals() - TABLE_SIGNALS
        return self._supplied

    def table(self, cards: Sequence[Card], before: Sequence[str] = ()) -> ClientTable:
        """Return a table of ``cards`` with the facts that are required, and no others, so that anybody can join.

        ``before`` names the clients of the federation so far. Whose sealed labels turn out to be a lie when they are
        opened is left out.
        """
        labels: LabelInfo | LabelGramRows | None = None
        if self._required & _LABELS and self._labels is not None:
            cards, labels = self._decode_labels(self._labels, cards, before)
        elif self._required & _LABELS:
            labels = self._plain_labels(cards)
        names = [card.name for card in cards]
        sizes = [card.description.size or 0 for card in cards] if Signal.SIZES in self._required else None
        self._facts.update({card.name: card.description for card in cards})
        return ClientTable(names=names, sizes=sizes, labels=labels)

    def _plain_labels(self, cards: Sequence[Card]) -> LabelCounts:
        counts = [card.description.label_counts or () for card in cards]
        width = self.classes or max(map(len, counts), default=0)
        return LabelCounts([_pad_counts(c, width) for c in counts])

    def _decode_labels(
        self, opener: LabelDecoder, cards: Sequence[Card], before: Sequence[str]
    ) -> tuple[Sequence[Card], LabelInfo | LabelGramRows]:
        known = {**self._facts, **{card.name: card.description for card in cards}}
        sizes = {name: description.size for name, description in known.items() if description.size is not None}
        while True:
            sealed = {card.name: card.description.sealed_labels or b"" for card in cards}
            try:
                return cards, opener.open(sealed, sizes, before)
            except ClientRefusedError as error:
                # Until they send something else they take no part.
                self._checked.update({n: (sealed[n], shorten(why)) for n, why in error.refused.items() if n in sealed})
                self._demands += 1
                left = [card for card in cards if card.name not in error.refused]
                # Nobody is left, or the refusal names nobody of them: asking again would go on for ever.
                if len(left) in (0, len(cards)):
                    raise
                cards = left

    def first_table(self, count: int) -> ClientTable:
        """Return the table of everybody online, whose number of classes is the federation's from now on.

        When labels turn out to be unusable as they are opened, it waits until there are ``count`` others.
        """
        while True:
            cards = self.online
            try:
                table = self.table(list(cards.values()))
            except ClientRefusedError:
                if self.online == cards:
                    raise
            else:
                if table.n >= count or self._labels is None:
                    self.adopt(table)
                    return table
            self.assemble(count)

    def confirmations(self, clients: Sequence[str]) -> Mapping[str, bytes]:
        """Return what clients are shown, so that each can check what was made of its sealed labels."""
        return {} if self._labels is None else self._labels.confirmations(clients)

    def welcome(self, session: Session) -> None:
        """Let clients that were never seen before join the session."""
        online, at = self.online, self._version
        if self._welcomed == (at, session.changes):
            return
        known = session.table
        newcomers = [c for name, c in online.items() if name not in known and name not in self._refused]
        if newcomers:
            # Their order decides their indices: a run with the same clients must number them alike.
            newcomers.sort(key=lambda card: natural(card.name))
            joined = self._let_join(session, newcomers)
            if joined:
                log.info("joined: %s", ", ".join(joined))
        self._refresh_facts(session)
        if session.rules is not None:
            attributes = {name: card.description.attributes for name, card in online.items()}
            session.set_attributes({name: values for name, values in attributes.items() if values})
        self.remember(session)
        self._welcomed = (at, session.changes)

    def meet_again(self) -> None:
        """Take over at the next look what everybody says about itself, as if nobody had been welcomed."""
        self._welcomed = None

    def _let_join(self, session: Session, cards: list[Card]) -> list[str]:
        """Let clients join together; if that fails one by one, so that one that cannot join keeps nobody out."""
        try:
            table = self.table(cards, session.table.names)
            session.join(table)
        except KeyHolderError as error:
            log.warning("%s must wait: %s", ", ".join(card.name for card in cards), shorten(error.message))
            self._demands += 1
            return []
        except ClientRefusedError:  # all of them, and each is named when it is next looked at who is fit
            return []
        except Exception as error:  # what others say about themselves may make anything fail
            if len(cards) > 1:
                return [name for card in cards for name in self._let_join(session, [card])]
            self._refused.add(cards[0].name)
            log.warning("%s cannot join: %s", cards[0].name, shorten(str(error)))
            return []
        return list(table.names)

    def complete(self, session: Session) -> None:
        """Add the kinds of facts to a session's table that are required by now; who is not online says them later."""
        online, names = self.online, session.table.names
        away = [name for name in names if name not in online]
        if away and self._labels is not None:
            raise FederationTimeoutError(
                f"The first questions about clients need all of them, but {away[0]!r} is not online.",
                hint="start the run when everybody is there: sealed labels are opened together",
            )
        silent = Description("", size=0, label_counts=())
        session.update_facts(self.table([online.get(n) or Card(n, -1, silent, answers=False) for n in names]))

    def _refresh_facts(self, session: Session) -> None:
        """Take over what known clients now say about their sizes and labels."""
        table = session.table
        counts = Signal.LABEL_COUNTS in table.signals
        if not table.signals or (Signal.LABEL_PRODUCTS in table.signals and not counts):
            return  # products of labels cannot be exchanged one by one
        news = self._changed_descriptions(table)
        if not news:
            return
        self._facts.update({table.name(i): description for i, description in news.items()})
        sizes = table.sizes.copy()
        sizes[list(news)] = [sizes[i] if said.size is None else said.size for i, said in news.items()]
        labels = self._changed_labels(table.label_counts, news) if counts else None
        fresh = ClientTable(names=table.names, sizes=sizes, labels=labels)
        changed = table.differing(fresh)
        if len(changed):
            session.update_facts(fresh)
            log.info("new facts about %s", join_names(table.names_of(changed)))

    def _changed_labels(self, before: FloatArray, news: Mapping[int, Description]) -> LabelCounts:
        """Return label counts with those that clients now state; sealed ones are opened when a client joins only."""
        counts = before.copy()
        for i, said in news.items():
            if self._labels is None and said.label_counts is not None:
                counts[i] = _pad_counts(said.label_counts, counts.shape[1])
        return LabelCounts(counts)

    def _changed_descriptions(self, table: ClientTable) -> dict[int, Description]:
        """Return by index how clients of the table describe themselves now, where that is new and can be right."""
        counted = Signal.LABEL_COUNTS in table.signals
        classes = table.label_counts.shape[1] if counted else None
        return {
            table.index(name): card.description
            for name, card in self.online.items()
            if name in table and self._facts.get(name) != card.description and not (counted and _flaw(card, classes))
        }

    def remember(self, session: Session) -> None:
        """Put the names that are bound to keys on record, and read those of earlier runs."""
        keyed, events = self._keyed, None
        if keyed is None:
            events = session.journal.events(REGISTERED)
            keyed = frozenset(n for body in events for n in body["names"])
        news = [name for name, card in self.online.items() if card.registered and name not in keyed]
        if news or events == []:  # that nobody is registered is worth knowing too
            session.note(REGISTERED, {"names": news, "ticket": session.journal.last()[1] + 1})
        if news or self._keyed is None:
            self._keyed = keyed | frozenset(news)
            self._demands += 1

    def available(self, session: Session) -> IntArray:
        """Return the members that are online."""
        online, table = self.online, session.table
        at = (self._version, session.changes)
        if self._free is None or self._free[0] != at:
            self._free = (at, table.indices([name for name in online if name in table]))
        return self._free[1]

    def busy(self, session: Session, clients: IntArray) -> IntArray:
        """Return those of ``clients`` that still work on something else."""
        if not self.debts.open and not self.debts.working:
            return clients[:0]
        online, names = self.online, session.table.names_of(clients)
        return clients[[self.debts.busy(name, online[name].node) for name in names]]

    # -- queries --------------------------------------------------------------------------------------------------

    def losses(
        self, arrays: ArrayRecord, names: Sequence[str], signals: frozenset[Signal], deadline: float
    ) -> Mapping[Signal, FloatArray]:
        """Ask ``names`` for losses of ``arrays``; NaN for clients that do not answer in time."""
        content = RecordDict({_ARRAYS: arrays, RECORD: ask_record(signals)})
        online = self.online
        messages = {
            name: Message(content, dst_node_id=online[name].node, message_type=LOSSES, ttl=2 * deadline)
            for name in names
            if name in online and Losses.needs in online[name].description.signals
        }
        replies = exchange(Outbox(self.grid, self.clock, self.sleep), messages, deadline, self.debts)
        reports = {
            name: reply.error or reply.message.content.config_records.get(RECORD) for name, reply in replies.items()
        }
        return read_losses(names, signals, reports, partial(log.warning, "client %r gave no losses: %s"))


def _flaw(card: Card, classes: int | None) -> str | None:
    """Return why the label counts of a client cannot be right where there are so many classes, or None."""
    counts, size = card.description.label_counts, card.description.size
    if counts is None:
        return None
    if classes is not None and len(counts) > classes:
        return f"it names {len(counts)} classes; there are {classes} (CohortStrategy(classes=...) says how many)"
    if size is not None and sum(counts) > size:
        return f"it counts {sum(counts)} samples in classes, but {size} in all"
    return None


def _pad_counts(counts: Sequence[int], width: int) -> list[int]:
    """Return counts of ``width`` classes; who names fewer holds none of the others."""
    return [*counts, *[0] * (width - len(counts))]
