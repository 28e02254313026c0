"""The sites of a FLARE federation, as far as the server knows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedcohort.core.clients import ClientTable, LabelCounts
from fedcohort.core.errors import FedcohortError
from fedcohort.core.signals import TABLE_SIGNALS, Signal
from fedcohort.core.text import join_names, natural, shorten
from fedcohort.hosts.ask_again import PostponedClients
from fedcohort.hosts.wire import LABELS, Description, most_classes
from fedcohort.session.session import Session


class Sites:
    """The connected sites and their descriptions. FLARE authenticates their names.

    Parameters
    ----------
    required : set of Signal
        What the selector needs to know about a site.
    classes : int, optional
        Number of classes. Default: as many as at least two sites, and more than a fifth of all, name.
    """

    def __init__(self, required: frozenset[Signal], classes: int | None = None) -> None:
        self.required = required
        self.classes = classes
        self.connected: tuple[str, ...] = ()
        self.described: dict[str, Description] = {}
        self.unfit: dict[str, str] = {}  # by site, why it is left out for now
        self.postponed = PostponedClients()

    def unknown(self) -> list[str]:
        """Return the connected sites that should be asked for a description."""
        return [name for name in self.connected if name not in self.described and not self.postponed.waits(name)]

    def describe(self, name: str, record: Mapping[str, object] | None, problem: str) -> str:
        """Store a site's description; return why the site is left out, or an empty string."""
        try:
            if record is None:
                raise ValueError(problem or "it does not answer fedcohort's questions")
            description = Description.from_record(record)
            lacking = sorted(self.required - description.known_signals())
            if lacking:
                raise ValueError(f"it cannot supply {', '.join(repr(s.name) for s in lacking)}")
            if flaw := description.label_rejection_reason():
                raise ValueError(flaw)
        except ValueError as error:
            return self._refuse(name, str(error))
        # A site that described itself badly before may do better now; the newest description counts.
        self.unfit.pop(name, None)
        self.described[name] = description
        return ""

    def _refuse(self, name: str, why: str) -> str:
        self.unfit[name] = shorten(why)
        self.postponed.add(name)
        return self.unfit[name]

    def fit(self) -> list[str]:
        """Return the connected sites that can take part, in natural order of their names."""
        most = self._most_classes()
        names = (name for name in self.connected if name in self.described and not self._rejection_reason(name, most))
        return sorted(names, key=natural)

    def _most_classes(self) -> int | None:
        if self.classes is not None:
            return self.classes
        described = (self.described[name].label_counts for name in self.connected if name in self.described)
        return most_classes(len(counts) for counts in described if counts is not None)

    def _rejection_reason(self, name: str, most: int | None) -> str:
        """Return why a site's label counts cannot be right if there are ``most`` classes, or an empty string."""
        return self.described[name].label_rejection_reason(most) if self.required & LABELS else ""

    def absent(self) -> list[str]:
        """Describe the sites that are connected but cannot take part, with the reasons."""
        reasons: dict[str, list[str]] = {}
        most = self._most_classes()
        for name in self.connected:
            why = self.unfit.get(name) or (self._rejection_reason(name, most) if name in self.described else "")
            if why:
                reasons.setdefault(why, []).append(name)
        silent = [name for name in self.unknown() if name not in self.unfit]
        if silent:
            reasons["have not described themselves"] = silent
        return [f"{why.rstrip('.')}: {join_names(names)}" for why, names in reasons.items()]

    def supplied_signals(self) -> frozenset[Signal]:
        """Return what every site that can take part can report or answer."""
        return self.known_signals() - TABLE_SIGNALS

    def known_signals(self) -> frozenset[Signal]:
        """Return what is known about every site that can take part."""
        signals = [self.described[name].known_signals() for name in self.fit()]
        return frozenset.intersection(*signals) if signals else frozenset()

    def require(self, signals: frozenset[Signal]) -> None:
        """From now on, admit only sites that also supply these signals."""
        self.required |= signals

    def first_table(self, count: int) -> ClientTable:
        """Return the table of all sites that can take part."""
        return self.table(self.fit())

    def table(self, names: Sequence[str]) -> ClientTable:
        """Return a table of sites with only the facts that are required, so that any site can join later."""
        facts = [self.described[name] for name in names]
        labels = None
        if self.required & LABELS:
            if self.classes is None:
                self.classes = max((len(description.label_counts or ()) for description in facts), default=0)
            labels = LabelCounts([description.padded_counts(self.classes) for description in facts])
        sizes = [description.size or 0 for description in facts] if Signal.SIZES in self.required else None
        return ClientTable(names=names, sizes=sizes, labels=labels)

    def admit_new_clients(self, session: Session) -> list[str]:
        """Let sites that are new to the session join; return their names."""
        newcomers = [name for name in self.fit() if name not in session.table]
        joined = []
        for name in newcomers:  # one by one, so that a site that cannot join does not keep others out
            try:
                session.join(self.table([name]))
                joined.append(name)
            except FedcohortError as error:
                self._refuse(name, error.message)
                del self.described[name]
        if session.rules is not None:
            described = {name: self.described[name].attributes for name in self.fit()}
            session.set_attributes({name: attributes for name, attributes in described.items() if attributes})
        return joined
