"""A client's own record of what it has released about its data, with a fixed budget."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedcohort.core.arrays import FloatArray
from fedcohort.core.errors import BudgetError, InputError, JournalError
from fedcohort.core.files import read_file, write_file
from fedcohort.core.validate import instance
from fedcohort.core.validate import number as check_number
from fedcohort.core.validate import path as check_path
from fedcohort.privacy.noise import CountNoise, LossNoise, Release, fit_counts, total_epsilon

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_Question = tuple[float, str, float, int]
"""A request for label counts: the noise's epsilon, mechanism and delta, and the number of classes."""


@dataclass
class _Book:
    """The contents of a ledger's file."""

    lines: list[str] = field(default_factory=list)
    releases: list[Release] = field(default_factory=list)
    answers: dict[_Question, list[float]] = field(default_factory=dict)  # noisy counts, as they were drawn

    @classmethod
    def of(cls, lines: list[str], path: Path) -> _Book:
        book = cls()
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
                if "said" in entry or "rho" in entry:
                    raise ValueError("version 0.2 wrote it, in another format")
                answer = entry.pop("answer", None)
                book.releases.append(Release(**entry))
                if answer is not None:
                    epsilon, mechanism, delta = answer["noise"]
                    noisy = [float(value) for value in answer["noisy"]]
                    book.answers[epsilon, mechanism, delta, len(noisy)] = noisy
                book.lines.append(line)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise JournalError(
                    f"Line {number} of the privacy ledger {path} cannot be read: {error}.",
                    hint="a ledger that cannot be read must be treated as spent: more releases could exceed its budget",
                ) from error
        return book


class Ledger:
    """All releases of one client, recorded by the client.

    A release is written to disk before it is sent, so a crash can lose budget but never hide a release. Several
    processes and objects may share one file: each locks and reads it before every release. Only its user can read the
    file (mode 0600), and it holds only what was released.

    Parameters
    ----------
    epsilon, delta : float
        The budget of all releases together. A delta above 0 needs the extra ``dp``.
    path : path, optional
        The file, with one line per release; its lock is ``<path>.lock``. Default: in memory.

    Examples
    --------
    >>> ledger = Ledger(epsilon=1.0, delta=0.0)
    >>> ledger.charge(Release("loss", 0.4)); ledger.charge(Release("loss", 0.4))
    >>> ledger.spent
    0.8
    >>> ledger.charge(Release("loss", 0.4))
    Traceback (most recent call last):
        ...
    fedcohort.core.errors.BudgetError: The privacy budget does not cover another release of 'loss': 2 releases have
    spent epsilon 0.8 of 1, and with this one it would be 1.2.
    """

    def __init__(self, epsilon: float, delta: float = 0.0, path: str | Path | None = None) -> None:
        self.epsilon, self.delta = check_number(epsilon, "'epsilon'"), check_number(delta, "'delta'")
        if not self.epsilon > 0 or not 0 <= self.delta < 1:
            raise InputError(
                f"A budget must have epsilon > 0 and 0 <= delta < 1. Got epsilon={epsilon!r}, delta={delta!r}."
            )
        # Resolved, so that all links to the file share one lock.
        self._path = None if path is None else check_path(path, "'path'").resolve()
        if self._path is not None and self._path.is_dir():
            raise InputError(f"A ledger must be a file; {self._path} is a directory.")
        self._memory: list[str] = []
        self._alone = threading.Lock()
        with self._hold():  # a file that cannot be read is refused now, not at the first release
            if self._path is not None and self._path.exists():
                self._path.chmod(0o600)

    # -- the file -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _hold(self) -> Iterator[_Book]:
        """Lock the ledger and return its current contents."""
        with self._alone, contextlib.ExitStack() as stack:
            if self._path is None:
                yield _Book.of(self._memory, Path("in memory"))
                return
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
            # The lock is a separate file, because every release replaces the ledger itself.
            lock = stack.enter_context(os.fdopen(os.open(f"{self._path}.lock", flags, 0o600), "w"))
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX)
            # Bytes that are not text are not JSON either, so the error names their line.
            lines = read_file(self._path).decode(errors="replace").splitlines() if self._path.exists() else []
            yield _Book.of(lines, self._path)

    def _write(self, lines: list[str]) -> None:
        """Replace the whole file, durably; a crash leaves either the old file or the new one."""
        if self._path is None:
            self._memory = lines
            return
        write_file(self._path, "".join(f"{line}\n" for line in lines).encode(), mode=0o600)

    @property
    def releases(self) -> tuple[Release, ...]:
        """All releases so far, oldest first."""
        with self._hold() as book:
            return tuple(book.releases)

    @property
    def spent(self) -> float:
        """The total epsilon of all releases so far, at the ledger's delta."""
        return total_epsilon(self.releases, self.delta)

    def charge(self, release: Release) -> None:
        """Record a release that is about to be made; BudgetError, and nothing is recorded, if it is not covered."""
        instance(release, Release, "'release'")
        with self._hold() as book:
            self._check_budget(book, release)
            self._write([*book.lines, _entry(release)])

    def _check_budget(self, book: _Book, release: Release) -> None:
        after = total_epsilon([*book.releases, release], self.delta)
        # Ten releases of 0.1 must fit into a budget of 1, even if their floating-point sum does not.
        if after > self.epsilon * (1 + 1e-9):
            before = total_epsilon(book.releases, self.delta)
            raise BudgetError(
                f"The privacy budget does not cover another release of {release.kind!r}: {len(book.releases)} "
                f"releases have spent epsilon {before:.4g} of {self.epsilon:g}, and with this one it would be "
                f"{after:.4g}."
            )

    # -- releases -----------------------------------------------------------------------------------------------

    def counts(self, counts: ArrayLike, noise: CountNoise, *, refresh: bool = False) -> FloatArray:
        """Return a client's label counts with noise, fitted to their size, and record the release.

        Parameters
        ----------
        counts : (B,) whole numbers
        refresh : bool
            Draw new noise, which is charged as another release. Otherwise the first answer with this noise is repeated
            for ever, even if the data change, because a new answer would reveal that. The size is public, so the answer
            is fitted to the current size.
        """
        values = np.asarray(counts)
        noise.check(values)
        question = (*noise.question, len(values))
        with self._hold() as book:
            noisy = None if refresh else book.answers.get(question)
            if noisy is None:
                release = noise.release
                self._check_budget(book, release)
                # Recorded before it is returned: otherwise the same counts could be asked for again.
                noisy = noise.noisy(values).tolist()
                answer = {"noise": question[:3], "noisy": noisy}
                self._write([*book.lines, _entry(release, answer=answer)])
        return fit_counts(noisy, float(values.sum()))

    def loss(self, losses: ArrayLike, noise: LossNoise) -> float:
        """Return the mean of a client's losses with noise, and record it; every answer is a release."""
        noise.measurement  # noqa: B018 - if OpenDP is missing, this fails before anything is charged
        self.charge(noise.release)
        return noise.noisy_mean(losses)


def _entry(release: Release, **more: Any) -> str:
    return json.dumps({**asdict(release), **more})
