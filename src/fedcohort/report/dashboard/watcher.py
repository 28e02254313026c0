"""Everything in a folder that the dashboard can follow; damage to one item does not affect the others."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from fedcohort.core.errors import FedcohortError, InputError
from fedcohort.core.text import printable
from fedcohort.journal.lock import LIVE
from fedcohort.report.dashboard.feed import ExperimentItem
from fedcohort.report.dashboard.sessions import JournalItem

log = logging.getLogger(__name__)
T = TypeVar("T")
_DEPTH = 3  # levels of folders that are searched for experiments
MAX_FOLDERS = 5_000  # searched in each poll; a folder with more is not a folder of experiments
UNREADABLE = "unreadable"
_WAITING = f".sqlite{LIVE}"
Item = ExperimentItem | JournalItem


class _DamagedError(FedcohortError, ValueError):
    """An experiment or journal is damaged in an unexpected way."""


class WatchedItem:
    """One item, protected from damage to its files.

    Another process writes the files; they may be incomplete or damaged. If reading them raises an exception, the item
    is shown as unreadable, with the error, until it can be read again.
    """

    def __init__(self, item: Item, kind: str) -> None:
        self.item, self.kind = item, kind
        self.id = item.id
        self._damage: dict[str, str] = {}  # message by attempted operation
        self._bumps = 0

    @property
    def version(self) -> int:
        """Changes whenever the item or its damage does."""
        return self.item.version + self._bumps

    def _attempt(self, operation: str | None, work: Callable[[], T]) -> T:
        """Return the result of ``work``; damage is recorded under ``operation``, if that is given."""
        try:
            result = work()
        except FedcohortError:
            raise
        except Exception as error:
            message = f"{self.id} is damaged: {type(error).__name__}: {printable(error)[:300]}."
            if operation is not None and self._damage.get(operation) != message:
                self._damage[operation] = message
                self._bumps += 1
                log.warning("%s cannot be shown: %s", self.id, message, exc_info=log.isEnabledFor(logging.DEBUG))
            raise _DamagedError(message) from error
        if operation is not None and self._damage.pop(operation, None) is not None:
            self._bumps += 1
        return result

    def poll(self) -> None:
        """Read what is new."""
        try:
            self._attempt("poll", self.item.poll)
        except FedcohortError as error:
            if "poll" not in self._damage:  # the library's own errors are not recorded by _attempt
                self._damage["poll"] = error.message
                self._bumps += 1

    def overview(self) -> dict[str, Any]:
        """Return a line for the list, even if the item is damaged."""
        try:
            line = self._attempt("overview", lambda: _line(self.item.overview()))
        except FedcohortError as error:
            line = dict.fromkeys(("total", "rate", "left", "runs"))
            line |= {"id": self.id, "kind": self.kind, "state": UNREADABLE, "message": error.message, "done": 0}
        if self._damage:
            line |= {"state": UNREADABLE, "message": next(iter(self._damage.values())), "left": None}
        return line

    def detail(self) -> dict[str, Any]:
        """Return everything the page shows about the item; only its line in the list if it is damaged."""
        try:
            detail = self._attempt("detail", lambda: _as_json(self.item.detail()))
        except FedcohortError:
            return {**self.overview(), "warnings": [], "sections": [], "table": []}
        return {**detail, **self.overview()}

    def cohort(self, run: str, round_: int) -> list[dict[str, Any]]:
        """Return the cohort of a round with the outcome of each client."""
        return self._attempt(None, lambda: _as_json(self.item.cohort(run, round_)))

    def why(self, run: str, round_: int, client: str | None) -> dict[str, Any]:
        """Explain a choice."""
        return self._attempt(None, lambda: _as_json(self.item.why(run, round_, client)))

    def history_of(self, client: str) -> list[dict[str, Any]]:
        """Return one client's part in every round of a live run."""
        item = self.item
        if not isinstance(item, JournalItem):
            raise InputError(f"There is no live run called {self.id!r} here.")
        return self._attempt(None, lambda: _as_json(item.history_of(client)))


def _as_json(value: T) -> T:
    """Return ``value`` if it can be sent as JSON; a damaged file may hold anything."""
    json.dumps(value, allow_nan=False)
    return value


def _line(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line for the list, with numbers where the page expects numbers."""
    for key in ("done", "total", "rate", "left", "runs"):
        value = line[key]
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value)
        ):
            raise ValueError(f"its {key!r} is {value!r}, which is not a number")
    return _as_json(line)


class Watcher:
    """Everything that can be followed below a folder, or one journal file.

    Parameters
    ----------
    root : a folder with experiments and journals, an experiment's directory, or a journal
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.items: dict[str, WatchedItem] = {}
        self._journals: dict[str, Path] = {}
        self._note = ""

    def poll(self) -> None:
        """Find new items and read what changed."""
        journals = {}
        items, complete = _find_items(self.root)
        self._note = "" if complete else f"Only the first {MAX_FOLDERS} folders below {self.root} are searched."
        for path, kind in items:
            name = path.name if path == self.root else path.relative_to(self.root).as_posix()
            if name not in self.items:
                item: Item = ExperimentItem(path, name) if kind == "experiment" else JournalItem(path, name)
                self.items[name] = WatchedItem(item, kind)
            if kind == "journal":
                journals[name] = path
        self._journals = journals
        for watched in list(self.items.values()):
            watched.poll()

    @property
    def version(self) -> tuple[tuple[str, int], ...]:
        """Changes whenever anything does."""
        return tuple((item.id, item.version) for item in list(self.items.values()))

    def journals(self) -> dict[str, Path]:
        """Return the journals of live sessions by name, for ``/metrics``."""
        return dict(self._journals)

    def overview(self) -> dict[str, Any]:
        """Return the list of all items, with running ones first."""
        lines = [item.overview() for item in list(self.items.values())]
        lines.sort(key=lambda line: (line["state"] not in ("running", "waiting"), line["id"]))
        return {"root": printable(self.root), "note": self._note, "items": lines}


def _find_items(root: Path) -> tuple[list[tuple[Path, str]], bool]:
    """Return what there is to follow, and whether every folder was searched.

    A link to an experiment is followed. A link to any other folder is not, because it may lead to the root of the disk
    or back to itself.
    """
    if root.is_file():
        return [(root, "journal")], True
    items: list[tuple[Path, str]] = []
    level, searched = [root], 0
    for depth in range(_DEPTH + 1):
        deeper: list[Path] = []
        for folder in level:
            if searched == MAX_FOLDERS:
                return items, False
            searched += 1
            entries: list[Path] = []
            with contextlib.suppress(OSError):  # a folder may vanish, or not be ours to read
                if (folder / "meta.json").is_file():
                    items.append((folder, "experiment"))
                elif not folder.is_symlink() or folder == root:
                    entries = sorted(folder.iterdir())
            for entry in entries:
                with contextlib.suppress(OSError):  # it may vanish after its folder was listed
                    if entry.suffix == ".sqlite" and entry.is_file():
                        items.append((entry, "journal"))
                    elif entry.name.endswith(_WAITING) and not entry.with_suffix("").exists():
                        items.append((entry.with_suffix(""), "journal"))  # written when its first clients are there
                    elif depth < _DEPTH and entry.is_dir() and not entry.name.startswith("."):
                        deeper.append(entry)
        level = deeper
    return items, True


def plain_json(value: Mapping[str, Any]) -> str:
    """Return compact JSON; figures have turned NaN into null."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
