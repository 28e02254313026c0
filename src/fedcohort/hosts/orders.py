"""An operator's orders during a run: new rules or another selector, from the next round on.

An order is a small file in a folder next to the journal. The host takes it before it asks for the next cohort. If no
run is active, the next one takes it. The change names its order in the same transaction, and the file is deleted after
that. So an order is carried out exactly once, even if a process is killed. Orders are ignored if their
file or folder belongs to another user or if others can write to it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcohort.core.errors import FedcohortError, InputError
from fedcohort.core.files import open_file, write_file
from fedcohort.core.protocol import SELECTORS
from fedcohort.core.registry import is_reference
from fedcohort.core.text import short_repr
from fedcohort.journal.events import CHANGED, REFUSED, SELECTOR, SHADOW
from fedcohort.journal.lock import ORDERS, target
from fedcohort.session.rules import Rules

if TYPE_CHECKING:
    from fedcohort.session.session import Session

log = logging.getLogger(__name__)
_MAX_BYTES = 1 << 22  # read from one file
_CHANGES = (CHANGED, SELECTOR, SHADOW, REFUSED)  # events that name their order
_LISTS = ("block", "unblock", "pin", "unpin", "resume")
_RULES = frozenset(rule.name for rule in fields(Rules))
_RULE_PARTS = ("rules", *_LISTS, "pause")
_PARTS = frozenset((*_RULE_PARTS, "selector", "trial", "watch", "id"))


@dataclass(frozen=True)
class Order:
    """A change of rules, or of the selector.

    Attributes
    ----------
    rules : Mapping, optional
        Replaces all current rules; None keeps them. The other changes come after this one.
    block, unblock, pin, unpin, resume : sequence of str
        Names of clients.
    pause : mapping of str to int
        By client, for how many rounds it is not chosen.
    selector : str, optional
        The registered name of the selector that chooses from now on, with its defaults.
    trial : int
        For how many rounds it is a shadow first.
    watch : bool
        Whether it is only a shadow, and removed after these rounds.
    """

    rules: Mapping[str, Any] | None = None
    block: Sequence[str] = ()
    unblock: Sequence[str] = ()
    pin: Sequence[str] = ()
    unpin: Sequence[str] = ()
    pause: Mapping[str, int] = field(default_factory=dict)
    resume: Sequence[str] = ()
    selector: str | None = None
    trial: int = 0
    watch: bool = False
    id: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def names(self) -> list[str]:
        """The clients that the order names."""
        listed = () if self.rules is None else Rules(**self.rules).named
        changed = [name for key in _LISTS for name in getattr(self, key)]
        return list(dict.fromkeys([*listed, *changed, *self.pause]))

    def with_names(self, name: Callable[[str], str]) -> Order:
        """Return the same order with ``name(client)`` in place of each client."""
        changes: dict[str, Any] = {key: [name(client) for client in getattr(self, key)] for key in _LISTS}
        changes["rules"] = None if self.rules is None else Rules(**self.rules).with_names(name).to_dict()
        return replace(self, **changes, pause={name(client): rounds for client, rounds in self.pause.items()})

    def new_rules(self, rules: Rules | None, round_: int) -> Rules:
        """Return the rules that apply from ``round_`` on, if ``rules`` applied before."""
        changed = (rules or Rules()).to_dict() if self.rules is None else Rules(**self.rules).to_dict()
        _change(changed, "blocked", self.block, self.unblock)
        _change(changed, "pinned", self.pin, self.unpin)
        # Pauses that are over are dropped, or the rules would keep growing.
        paused = {name: until for name, until in (changed.pop("paused", None) or {}).items() if until > round_}
        for name in self.resume:
            if name not in paused:
                raise InputError(f"The client {name!r} is not paused. Paused: {', '.join(paused) or 'nobody'}.")
            del paused[name]
        paused |= {name: round_ + rounds for name, rounds in self.pause.items()}
        if paused:
            changed["paused"] = paused
        return Rules(**changed)


def _change(rules: dict[str, Any], key: str, added: Sequence[str], removed: Sequence[str]) -> None:
    names = list(rules.get(key, ()))
    for name in removed:
        if name not in names:
            raise InputError(f"The client {name!r} is not {key}. {key.capitalize()}: {', '.join(names) or 'nobody'}.")
        names.remove(name)
    rules[key] = list(dict.fromkeys([*names, *added]))


# -- giving -----------------------------------------------------------------------------------------------------------


def give(journal: str | Path, order: Order) -> None:
    """Leave an order for the host of a journal; it is durable when this returns."""
    path = target(journal)
    owner = path.stat().st_uid
    if hasattr(os, "geteuid") and os.geteuid() != owner:
        raise InputError(
            f"The journal {journal} belongs to another user (uid {owner}), and its server accepts orders from "
            "nobody else.",
            hint="give the order as that user",
        )
    folder = _folder(path)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not _is_private(folder.lstat(), owner, stat.S_ISDIR):
        raise InputError(f"{folder} is not a folder that only the journal's owner can write to.", hint="remove it")
    name = f"{time.time_ns():020d}-{order.id}"  # so that orders are taken in the order in which they were given
    write_file(folder / name, json.dumps(asdict(order)).encode(), mode=0o600)


def waiting(journal: str | Path) -> list[Order]:
    """Return the orders that the host of a journal has not taken yet, oldest first."""
    return [order for _, order in _order_files(target(journal)) if isinstance(order, Order)]


# -- taking -----------------------------------------------------------------------------------------------------------


def take(session: Session, check: Callable[[Session, Rules], None] = lambda *_: None) -> list[Order]:
    """Carry out the orders that wait for a session's host, and return them.

    A host calls this before it asks for a cohort. An order that cannot be carried out is recorded with the reason and
    dropped.

    Parameters
    ----------
    check : callable, optional
        ``check(session, rules)`` raises a :class:`FedcohortError` for rules that the host cannot satisfy.
    """
    if session.journal.path is None:
        return []
    files = list(_order_files(target(session.journal.path)))
    if not files:
        return []
    done = {body.get("order") for kind in _CHANGES for body in session.journal.events(kind)}
    carried_out = []
    for file, order in files:
        if isinstance(order, str):
            log.warning("%s cannot be read as an order and is ignored: %s", file, order)
        elif order.id not in done:
            try:
                carry_out(session, order, check)
                carried_out.append(order)
            except FedcohortError as error:
                log.warning("an order of the operator is ignored: %s", error)
                session.note(REFUSED, {"order": order.id, "round": session.round, "reason": str(error)})
            session.commit()
        with contextlib.suppress(OSError):
            file.unlink()
    return carried_out


def carry_out(session: Session, order: Order, check: Callable[[Session, Rules], None] = lambda *_: None) -> None:
    """Change a session as an order says; raise an error if that is not possible."""
    if order.selector is None:
        rules = order.new_rules(session.rules, session.round)
        check(session, rules)
        session.set_rules(rules, order.id)
        return
    name = order.selector
    if is_reference(name):
        imported = SELECTORS.find_imported(name)
        if imported is None:
            raise InputError(
                f"This program has not imported {name!r}, and nothing is imported just because an order names it.",
                hint="name the selector where the run is started, for example as a shadow",
            )
        name = SELECTORS.reference(imported) or name
    if order.trial:
        session.try_selector(SELECTORS.create(name), order.trial, watch=order.watch, order=order.id)
    else:
        session.change_selector(SELECTORS.create(name), order=order.id)


def _order_files(path: Path) -> Iterator[tuple[Path, Order | str]]:
    """Yield the files of a journal's owner, oldest first, each with its order or why it cannot be read."""
    folder = _folder(path)
    try:
        owner = path.stat().st_uid
        if not _is_private(folder.lstat(), owner, stat.S_ISDIR):
            _warn(folder, "others than the journal's owner can write to it")
            return
        # Names begin with the time, so sorting puts the oldest first.
        files = sorted(file for file in folder.iterdir() if not file.name.startswith(".") and not file.is_symlink())
        for file in files:
            with open_file(file) as opened:
                status = os.fstat(opened.fileno())
                if _is_private(status, owner, stat.S_ISREG):
                    # The same id when a file is read again after a kill, another one when it is written again.
                    yield file, _read(opened.read(_MAX_BYTES), f"{file.name} {status.st_mtime_ns}")
    except FileNotFoundError:
        return
    except OSError as error:
        _warn(folder, str(error))


@cache
def _warn(folder: Path, why: str) -> None:
    """Warn only once that orders are ignored, because a host checks for them all the time."""
    log.warning("orders in %s are ignored: %s", folder, why)


def _is_private(status: os.stat_result, owner: int, is_kind: Callable[[int], bool]) -> bool:
    closed = os.name == "nt" or not status.st_mode & 0o022  # Windows does not have these bits
    return is_kind(status.st_mode) and status.st_uid == owner and closed


def _read(data: bytes, unnamed: str) -> Order | str:
    """Return an order, or why a file is none; ``unnamed`` is the id of one that was written by hand without."""
    try:
        table = json.loads(data)
        if not isinstance(table, dict) or not table.keys() <= _PARTS:
            got = f"'{min(table.keys() - _PARTS)}'" if isinstance(table, dict) else short_repr(table)
            raise InputError(f"An order is a JSON object with some of {', '.join(sorted(_PARTS))}. Got {got}.")
        order = Order(**{"id": unnamed, **table})
        _check_types(order)
        return order
    except (ValueError, RecursionError) as error:  # InputError is a ValueError
        return str(error)


def _check_types(order: Order) -> None:
    """Refuse an order with wrong types, which a file written by hand may have; the rules check their own values."""
    if order.rules is not None and not (isinstance(order.rules, dict) and order.rules.keys() <= _RULES):
        known = ", ".join(sorted(_RULES))
        raise InputError(f"The rules of an order are a table of {known}. Got {short_repr(order.rules)}.")
    for key in _LISTS:
        names = getattr(order, key)
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            raise InputError(f"'{key}' of an order must be a list of clients' names. Got {short_repr(names)}.")
    rounds = order.pause.values() if isinstance(order.pause, dict) else [0]
    if not all(type(number) is int and number > 0 for number in rounds):  # True is an int too
        raise InputError(
            "'pause' of an order must give each client a whole number of rounds, at least 1, like "
            f'{{"anna": 10}}. Got {short_repr(order.pause)}.'
        )
    if not isinstance(order.selector, str | None):
        raise InputError(f"'selector' of an order must be the name of a selector. Got {short_repr(order.selector)}.")
    if order.selector is not None and any(getattr(order, part) for part in _RULE_PARTS):
        raise InputError("An order changes the rules or the selector, not both.", hint="give two orders")
    if type(order.trial) is not int or order.trial < 0 or type(order.watch) is not bool:
        raise InputError(
            "'trial' of an order must be a whole number of rounds, and 'watch' true or false. Got "
            f"{short_repr(order.trial)} and {short_repr(order.watch)}."
        )
    if not isinstance(order.id, str):
        raise InputError(f"'id' of an order must be a text. Got {short_repr(order.id)}.")


def _folder(path: Path) -> Path:
    return path.with_name(path.name + ORDERS)
