"""What an operator orders during a run: other rules, from its next round on.

An order is a small file in a folder beside the journal. The host takes it before it asks for the next cohort; a run
that is stopped takes it when it is started again. The change of rules names its order in the same transaction, and only
then the file goes: so whatever is killed when, an order is carried out once. A folder or file of somebody else, or one
that others can write to, is not obeyed.
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
from fedcohort.core.text import short_repr
from fedcohort.journal.events import CHANGED, REFUSED
from fedcohort.journal.lock import ORDERS, target
from fedcohort.session.rules import Rules

if TYPE_CHECKING:
    from fedcohort.session.session import Session

log = logging.getLogger(__name__)
_MOST_BYTES = 1 << 22  # read of a file
_LISTS = ("block", "unblock", "pin", "unpin", "resume")
_RULES = frozenset(rule.name for rule in fields(Rules))


@dataclass(frozen=True)
class Order:
    """A change of rules.

    Attributes
    ----------
    rules : Mapping, optional
        What takes the place of all rules there are; None: those stay, but for the changes below.
    block, unblock, pin, unpin, resume : clients by name
    pause : mapping of str to int
        By client, for how many rounds it is not picked.
    """

    rules: Mapping[str, Any] | None = None
    block: Sequence[str] = ()
    unblock: Sequence[str] = ()
    pin: Sequence[str] = ()
    unpin: Sequence[str] = ()
    pause: Mapping[str, int] = field(default_factory=dict)
    resume: Sequence[str] = ()
    id: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def names(self) -> list[str]:
        """The clients it names."""
        given = {} if self.rules is None else Rules(**self.rules).to_dict()
        listed = [name for key in ("blocked", "pinned", "paused", "budgets") for name in given.get(key) or ()]
        changed = [name for key in _LISTS for name in getattr(self, key)]
        return list(dict.fromkeys([*listed, *changed, *self.pause]))

    def with_names(self, name: Callable[[str], str]) -> Order:
        """Return the same order with the clients it names under other names."""
        changes: dict[str, Any] = {key: [name(client) for client in getattr(self, key)] for key in _LISTS}
        changes["rules"] = None if self.rules is None else Rules(**self.rules).with_names(name).to_dict()
        return replace(self, **changes, pause={name(client): rounds for client, rounds in self.pause.items()})

    def carried_out(self, rules: Rules | None, round_: int) -> Rules:
        """Return the rules that hold from ``round_`` on, after those given."""
        found = (rules or Rules()).to_dict() if self.rules is None else Rules(**self.rules).to_dict()
        _change(found, "blocked", self.block, self.unblock)
        _change(found, "pinned", self.pin, self.unpin)
        # Pauses that are over would only make rules longer and longer.
        paused = {name: until for name, until in (found.pop("paused", None) or {}).items() if until > round_}
        for name in self.resume:
            if name not in paused:
                raise InputError(f"The client {name!r} is not paused. Paused: {', '.join(paused) or 'nobody'}.")
            del paused[name]
        paused |= {name: round_ + rounds for name, rounds in self.pause.items()}
        if paused:
            found["paused"] = paused
        return Rules(**found)


def _change(found: dict[str, Any], key: str, more: Sequence[str], less: Sequence[str]) -> None:
    names = list(found.get(key, ()))
    for name in less:
        if name not in names:
            raise InputError(f"The client {name!r} is not {key}. {key.capitalize()}: {', '.join(names) or 'nobody'}.")
        names.remove(name)
    found[key] = list(dict.fromkeys([*names, *more]))


# -- giving -----------------------------------------------------------------------------------------------------------


def give(journal: str | Path, order: Order) -> None:
    """Put an order where the host of a journal takes it; it is durable when this returns."""
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
    name = f"{time.time_ns():020d}-{order.id}"  # so that orders are taken as they were given
    write_file(folder / name, json.dumps(asdict(order)).encode(), mode=0o600)


def waiting(journal: str | Path) -> list[Order]:
    """Return the orders beside a journal that nobody has taken, oldest first."""
    return [order for _, order in _order_files(target(journal)) if isinstance(order, Order)]


# -- taking -----------------------------------------------------------------------------------------------------------


def take(session: Session, check: Callable[[Session, Rules], None] = lambda *_: None) -> list[Order]:
    """Carry out the orders that wait beside a session's journal, and return them.

    A host calls this before it asks for a cohort. What cannot be carried out is recorded with its reason and dropped.

    Parameters
    ----------
    check : callable, optional
        Raises an error of the library's own for rules that the host cannot keep.
    """
    if session.journal.path is None:
        return []
    found = list(_order_files(target(session.journal.path)))
    if not found:
        return []
    done = {body.get("order") for body in session.journal.events(CHANGED)}
    taken = []
    for file, order in found:
        if isinstance(order, str):
            log.warning("%s cannot be read as an order and is ignored: %s", file, order)
        elif order.id not in done:
            try:
                rules = order.carried_out(session.rules, session.round)
                check(session, rules)
                session.set_rules(rules, order.id)
                taken.append(order)
            except FedcohortError as error:
                log.warning("an order of the operator is ignored: %s", error)
                session.note(REFUSED, {"order": order.id, "round": session.round, "reason": str(error)})
            session.commit()
        with contextlib.suppress(OSError):
            file.unlink()
    return taken


def _order_files(path: Path) -> Iterator[tuple[Path, Order | str]]:
    """Yield the files of a journal's owner, oldest first, with the order each holds, or why it holds none."""
    folder = _folder(path)
    try:
        owner = path.stat().st_uid
        if not _is_private(folder.lstat(), owner, stat.S_ISDIR):
            _warn(folder, "others than the journal's owner can write to it")
            return
        # Names begin with the time: sorted, orders are taken as they were given.
        files = sorted(file for file in folder.iterdir() if not file.name.startswith(".") and not file.is_symlink())
        for file in files:
            with open_file(file) as opened:
                if _is_private(os.fstat(opened.fileno()), owner, stat.S_ISREG):
                    yield file, _read(opened.read(_MOST_BYTES))
    except FileNotFoundError:
        return
    except OSError as error:
        _warn(folder, str(error))


@cache
def _warn(folder: Path, why: str) -> None:
    """Say once that orders are ignored: a host looks for them all the time."""
    log.warning("orders in %s are ignored: %s", folder, why)


def _is_private(found: os.stat_result, owner: int, kind: Any) -> bool:
    closed = os.name == "nt" or not found.st_mode & 0o022  # Windows has no such bits
    return bool(kind(found.st_mode)) and found.st_uid == owner and closed


def _read(data: bytes) -> Order | str:
    try:
        order = Order(**json.loads(data))
        _check_types(order)
        return order
    except (ValueError, TypeError, AttributeError, RecursionError) as error:  # InputError is a ValueError
        return str(error)


def _check_types(order: Order) -> None:
    """Refuse what somebody wrote into a file by hand; the rules' own values are checked when they are carried out."""
    if order.rules is not None and not (isinstance(order.rules, dict) and order.rules.keys() <= _RULES):
        known = ", ".join(sorted(_RULES))
        raise InputError(f"The rules of an order are a table of {known}. Got {short_repr(order.rules)}.")
    for names in (getattr(order, key) for key in _LISTS):
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise InputError(f"An order must name clients in lists of strings. Got {short_repr(names)}.")
    if not all(isinstance(rounds, int) for rounds in order.pause.values()) or not isinstance(order.id, str):
        raise InputError(f"An order must pause each client for a number of rounds. Got {short_repr(order.pause)}.")


def _folder(path: Path) -> Path:
    return path.with_name(path.name + ORDERS)
