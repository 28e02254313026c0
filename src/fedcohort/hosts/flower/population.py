"""The clients of a live federation as a session needs them: the table, newcomers, who is available, answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from flwr.serverapp import Grid

from fedcohort.core.arrays import IntArray
from fedcohort.core.clients import ClientTable, LabelCounts, LabelGramRows, LabelInfo
from fedcohort.core.errors import FedcohortError, InputError, KeyHolderError, SignalError
from fedcohort.core.signals import TABLE_SIGNALS, Signal
from fedcohort.core.text import join_names, natural, shorten
from fedcohort.hosts.flower.exchange import OutstandingReplies
from fedcohort.hosts.flower.roster import Card, Roster
from fedcohort.hosts.round import FederationTimeoutError
from fedcohort.hosts.wire import LABELS, Description, most_classes
from fedcohort.journal.events import REGISTERED
from fedcohort.privacy.label_decoders import ClientRefusedError, LabelDecoder

if TYPE_CHECKING:
    from fedcohort.session.session import Session

log = logging.getLogger("flwr.fedcohort")
_SETTLE = 15.0  # seconds given to nodes that have not described themselves, once enough others have
_LOOK_EVERY = 0.25  # seconds between two checks of who is online
_LOG_EVERY = 10.0  # seconds between two log messages about what the run waits for
# Of the roster, and of what is demanded. Who is fit is computed again only if one of them changes.
_Version = tuple[int, int]


class Population:
    """The clients behind a grid.

    Parameters
    ----------
    required : set of Signal
        What the selector and its shadows need to know about a client.
    patience : float
        Longest time to wait for clients to come online, in seconds.
    labels : LabelDecoder, optional
        Decodes the sealed labels that clients send.
    describe_every : float, optional
        Seconds after which a client must describe itself again. Default: only when it connects.
    classes : int, optional
        Number of classes. Default: what clients agree on, see :meth:`most_classes`.
    waits : callable, optional
        Called repeatedly with what the population is waiting for.
    registered_only : bool
        Whether only nodes may take part whose name the SuperLink binds to their key.
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
        self._checked: dict[str, tuple[bytes, str | None]] = {}  # by client, sealed labels and what is wrong with them
        self._roster = Roster.of(grid, clock, sleep)
        self._roster.describe_every = describe_every
        self.outstanding = OutstandingReplies()
        self._refused: set[str] = set()  # clients that could not join
        self._unfit: dict[str, str] = {}  # by client, why it is left out, as last logged
        self._impostors: set[int] = set()
        self._registered_names: frozenset[str] | None = None  # that were ever bound to a key; from the journal
        self._facts: dict[str, Description] = {}  # by client, the description behind its facts in the table
        self._demands = 0  # increased whenever something other than the roster changes who is fit
        self._fit_at: _Version | None = None  # the version at which `_fit` was computed
        self._fit: dict[str, Card] = {}
        self._supplied: frozenset[Signal] | None = None
        # Cached, because they change rarely and a federation may have many thousand clients.
        self._welcomed: tuple[_Version, int] | None = None
        self._free: tuple[tuple[_Version, int], IntArray] | None = None

    @property
    def online(self) -> dict[str, Card]:
        """The clients that are online and can supply what is required, by name in natural order."""
        at = self._version
        if at == self._fit_at:  # cached, because this is read many times in a round
            return self._fit
        most = self.most_classes()
        fit: dict[str, Card] = {}
        unfit: dict[str, str] = {}
        for name, card in self._admitted_cards.items():
            why = self._rejection_reason(card, most)
            if why is not None:
                unfit[name] = why
            elif self._registered_names and name in self._registered_names and not card.registered:
                self._warn_of_impostor(card, "is the name of a registered node")
            else:
                fit[name] = card
        news: dict[str, list[str]] = {}
        for name, why in unfit.items():
            if self._unfit.get(name) != why:
                news.setdefault(why, []).append(name)
        for why, (first, *rest) in news.items():  # one message for all clients with the same fault
            more = f" (the same holds for {join_names(rest)})" if rest else ""
            log.warning("client %r is left out: %s%s", first, why, more)
        self._unfit = unfit
        self._fit_at, self._fit, self._supplied = at, fit, None
        return fit

    def _warn_of_impostor(self, card: Card, why: str) -> None:
        if card.node not in self._impostors:
            self._impostors.add(card.node)
            log.warning("node %d is left out: %r %s", card.node, card.name, why)

    def _rejection_reason(self, card: Card, classes: int | None) -> str | None:
        """Return why a client cannot take part, or None; sealed labels are checked without opening them."""
        description, sealed = card.description, card.description.sealed_labels
        if self._labels is None and self._required & LABELS and (why := description.label_rejection_reason(classes)):
            return why
        if self._labels is not None and sealed is not None:
            # Kept, because checking a signature takes long.
            if self._checked.get(card.name, (None, None))[0] != sealed:
                try:
                    self._labels.check(card.name, sealed)
                    self._checked[card.name] = (sealed, None)
                except FedcohortError as error:
                    self._checked[card.name] = (sealed, shorten(error.message))
            if (flaw := self._checked[card.name][1]) is not None:
                return flaw
        lacking = card.lacks(self._required, self._labels is not None)
        return f"it cannot supply {', '.join(repr(s.name) for s in lacking)}" if lacking else None

    def most_classes(self) -> int | None:
        """Return how many classes a client may name, or None if no client names any.

        This is the operator's number or that of the journal, or else what clients agree on.
        """
        if self.classes is not None:
            return self.classes
        described = (card.description.label_counts for card in self._admitted_cards.values())
        return most_classes(len(counts) for counts in described if counts is not None)

    def adopt(self, table: ClientTable) -> None:
        """Use the number of classes of a session's table from now on."""
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
            if not card.registered:
                self._warn_of_impostor(card, "is not a registered name")
        return {name: card for name, card in everyone.items() if card.registered}

    @property
    def _version(self) -> _Version:
        return self._roster.version, self._demands

    def refresh(self) -> None:
        """Check who is online now."""
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
                # A node that does not answer delays the run for a while, but cannot end it.
                if not self._roster.unanswered or now - enough_since > _SETTLE or now - begun > self._patience:
                    return
            if now - begun > self._patience:
                raise self._too_few(count)
            if len(online) < count:
                waiting = "; ".join([f"{len(online)} of the {count} clients needed can take part", *self.absent()])
            else:
                longest, silent = min(_SETTLE, self._patience), join_names(self._roster.silent)
                waiting = (
                    f"{len(online)} clients can take part, {count} are needed; at most {longest:g} s for nodes "
                    f"that have not identified themselves: {silent}"
                )
            self._waits(waiting)
            if now - logged > _LOG_EVERY:
                logged = now
                log.info("waiting: %s", waiting)
            self.sleep(_LOOK_EVERY)

    def absent(self) -> list[str]:
        """Describe the clients that are connected but cannot take part, with the reasons."""
        reasons: dict[str, list[str]] = {}
        online, admitted = self.online, self._admitted_cards
        for name in self._roster.online:
            if name not in online:
                why = self._unfit.get(name, "refused")
                if name not in admitted:
                    why = "not registered under a name (registered_only=True)"
                reasons.setdefault(why, []).append(name)
        if self._roster.silent:
            reasons["have not identified themselves"] = self._roster.silent
        return [f"{why.rstrip('.')}: {join_names(names)}" for why, names in reasons.items()]

    def _too_few(self, count: int) -> FedcohortError:
        """Return the error for a run that cannot begin, with the reasons why clients cannot take part."""
        online = self.online
        waited = (
            f"Waited {self._patience:g} s for {count} clients; {len(online)} can take part "
            f"({', '.join(list(online)[:10]) or 'none'}), "
            f"{'; '.join([f'{self._roster.nodes} nodes are online', *self.absent()])}."
        )
        unfit = [card for name, card in self._admitted_cards.items() if name not in online]
        lacking = {signal for card in unfit for signal in card.lacks(self._required, self._labels is not None)}
        if lacking:
            meanings = ", ".join(f"{s.name!r} is {s.meaning}" for s in sorted(lacking))
            return SignalError(
                f"{waited} ({meanings}.)",
                hint="wrap the ClientApp and give it what is missing: import fedcohort as fc, then "
                "fc.flower.cohort_client(app, fc.flower.Answers(...))",
            )
        return FederationTimeoutError(
            waited, hint="start more SuperNodes, lower min_available_nodes or wait_for, or raise patience"
        )

    # -- the table ------------------------------------------------------------------------------------------------

    def require(self, signals: frozenset[Signal]) -> None:
        """From now on, admit only clients that also supply these signals."""
        if not signals <= self._required:
            self._required |= signals
            self._demands += 1

    def known_signals(self) -> frozenset[Signal]:
        """Return what is known about every client that is online."""
        sealed = self._labels is not None
        signals = [card.description.known_signals(sealed) for card in self.online.values()]
        return frozenset.intersection(*signals) if signals else frozenset()

    def partly_supplied(self, signals: Iterable[Signal]) -> dict[Signal, list[str]]:
        """Return those of ``signals`` that only some clients online can supply, each with the names of the others."""
        sealed = self._labels is not None
        known = {name: card.description.known_signals(sealed) for name, card in self.online.items()}
        lacking = {signal: [name for name in known if signal not in known[name]] for signal in sorted(signals)}
        return {signal: names for signal, names in lacking.items() if 0 < len(names) < len(known)}

    def supplied_signals(self) -> frozenset[Signal]:
        """Return what every client that is online can report or answer."""
        if self._supplied is None:
            self._supplied = self.known_signals() - TABLE_SIGNALS
        return self._supplied

    def table(self, cards: Sequence[Card], before: Sequence[str] = ()) -> ClientTable:
        """Return a table of ``cards`` with only the facts that are required, so that any client can join later.

        ``before`` names the clients of the federation so far. Clients whose sealed labels prove false when they are
        opened are left out.
        """
        labels: LabelInfo | LabelGramRows | None = None
        if self._required & LABELS and self._labels is not None:
            cards, labels = self._decode_labels(self._labels, cards, before)
        elif self._required & LABELS:
            width = self.classes or max((len(card.description.label_counts or ()) for card in cards), default=0)
            labels = LabelCounts([card.description.padded_counts(width) for card in cards])
        names = [card.name for card in cards]
        sizes = [card.description.size or 0 for card in cards] if Signal.SIZES in self._required else None
        self._facts.update({card.name: card.description for card in cards})
        return ClientTable(names=names, sizes=sizes, labels=labels)

    def _decode_labels(
        self, decoder: LabelDecoder, cards: Sequence[Card], before: Sequence[str]
    ) -> tuple[Sequence[Card], LabelInfo | LabelGramRows]:
        known = {**self._facts, **{card.name: card.description for card in cards}}
        sizes = {name: description.size for name, description in known.items() if description.size is not None}
        while True:
            sealed = {card.name: card.description.sealed_labels or b"" for card in cards}
            try:
                return cards, decoder.open(sealed, sizes, before)
            except ClientRefusedError as error:
                # Refused clients are left out until they send other labels.
                self._checked.update({n: (sealed[n], shorten(why)) for n, why in error.refused.items() if n in sealed})
                self._demands += 1
                left = [card for card in cards if card.name not in error.refused]
                # Stop if nobody is left, or if none of these clients was refused, where the loop would not end.
                if len(left) in (0, len(cards)):
                    raise
                cards = left

    def first_table(self, count: int) -> ClientTable:
        """Return the table of all clients online; its number of classes is the federation's from now on.

        If sealed labels prove unusable when they are opened, wait until there are ``count`` other clients.
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
        """Return by client the confirmation with which it can check what was opened of its sealed labels."""
        return {} if self._labels is None else self._labels.confirmations(clients)

    def admit_new_clients(self, session: Session) -> None:
        """Let new clients join the session, and update the facts and attributes of the others."""
        online, at = self.online, self._version
        if self._welcomed == (at, session.changes):
            return
        known = session.table
        newcomers = [c for name, c in online.items() if name not in known and name not in self._refused]
        if newcomers:
            # Sorted, because the order decides their indices, which must be the same in every run.
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

    def refresh_descriptions(self) -> None:
        """Let the next :meth:`admit_new_clients` update the facts and attributes of all clients."""
        self._welcomed = None

    def _let_join(self, session: Session, cards: list[Card]) -> list[str]:
        """Let clients join together, or one by one if that fails, so that a bad client does not keep others out."""
        try:
            table = self.table(cards, session.table.names)
            session.join(table)
        except KeyHolderError as error:
            log.warning("%s must wait: %s", ", ".join(card.name for card in cards), shorten(error.message))
            self._demands += 1
            return []
        except ClientRefusedError:  # all of them; the reasons are logged with the next check of who is fit
            return []
        except Exception as error:  # a client's description may cause any error
            if len(cards) > 1:
                return [name for card in cards for name in self._let_join(session, [card])]
            self._refused.add(cards[0].name)
            log.warning("%s cannot join: %s", cards[0].name, shorten(str(error)))
            return []
        return list(table.names)

    def complete(self, session: Session) -> None:
        """Add kinds of facts that are now required to a session's table; clients that are offline add them later."""
        online, names = self.online, session.table.names
        away = [name for name in names if name not in online]
        if away and self._labels is not None:
            raise FederationTimeoutError(
                f"The first questions about clients need all of them, but {away[0]!r} is not online.",
                hint="start the run when all clients are online: sealed labels are opened together",
            )
        silent = Description("", size=0, label_counts=())
        session.update_facts(self.table([online.get(n) or Card(n, -1, silent, answers=False) for n in names]))

    def _refresh_facts(self, session: Session) -> None:
        """Update the sizes and labels of known clients whose descriptions have changed and are plausible."""
        table = session.table
        counted = Signal.LABEL_COUNTS in table.signals
        if not table.signals or (Signal.LABEL_PRODUCTS in table.signals and not counted):
            return  # products of labels cannot be replaced for single clients
        classes = table.label_counts.shape[1] if counted else None
        descriptions = {
            table.index(name): card.description
            for name, card in self.online.items()
            if name in table
            and self._facts.get(name) != card.description
            and not (counted and card.description.label_rejection_reason(classes))
        }
        if not descriptions:
            return
        sizes, counts = table.sizes.copy(), table.label_counts.copy() if counted else None
        for i, new in descriptions.items():
            self._facts[table.name(i)] = new
            if new.size is not None:
                sizes[i] = new.size
            # Sealed labels are opened only when a client joins.
            if counts is not None and self._labels is None and new.label_counts is not None:
                counts[i] = new.padded_counts(counts.shape[1])
        labels = None if counts is None else LabelCounts(counts)
        fresh = ClientTable(names=table.names, sizes=sizes, labels=labels)
        changed = table.differing(fresh)
        if len(changed):
            session.update_facts(fresh)
            log.info("new facts about %s", join_names(table.names_of(changed)))

    def remember(self, session: Session) -> None:
        """Record the names that are bound to keys, and read those of earlier runs."""
        keyed, events = self._registered_names, None
        if keyed is None:
            events = session.journal.events(REGISTERED)
            keyed = frozenset(n for body in events for n in body["names"])
        new = [name for name, card in self.online.items() if card.registered and name not in keyed]
        if new or events == []:  # an empty list is recorded too: nobody is registered
            session.note(REGISTERED, {"names": new, "ticket": session.journal.last()[1] + 1})
        if new or self._registered_names is None:
            self._registered_names = keyed | frozenset(new)
            self._demands += 1

    def available(self, session: Session) -> IntArray:
        """Return the clients of the session that are online."""
        online, table = self.online, session.table
        at = (self._version, session.changes)
        if self._free is None or self._free[0] != at:
            self._free = (at, table.indices([name for name in online if name in table]))
        return self._free[1]

    def busy(self, session: Session, clients: IntArray) -> IntArray:
        """Return those of ``clients`` that still work on something else."""
        if not self.outstanding.open and not self.outstanding.working:
            return clients[:0]
        online, names = self.online, session.table.names_of(clients)
        return clients[[self.outstanding.busy(name, online[name].node) for name in names]]
