"""A client's own record of what it has released about its data, and the end of its budget."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedcohort.arrays import FloatArray
from fedcohort.errors import BudgetError, InputError, JournalError
from fedcohort.guard import guarded
from fedcohort.privacy.noise import Below, CountNoise, LossNoise, Release, composed, plausible


@guarded(methods=True)
class Ledger:
    """Every release of one client, kept by the client.

    A release is written down before it leaves, so that a crash can only lose budget, never hide a release.

    Parameters
    ----------
    epsilon, delta : float
        The budget of everything ever released.
    path : path, optional
        The file to keep it in, one line per release. Default: in memory.

    Examples
    --------
    >>> ledger = Ledger(epsilon=1.0, delta=0.0)
    >>> ledger.charge(Release.pure("loss", 0.4)); ledger.charge(Release.pure("loss", 0.4))
    >>> ledger.spent
    0.8
    >>> ledger.charge(Release.pure("loss", 0.4))
    Traceback (most recent call last):
        ...
    fedcohort.errors.BudgetError: The privacy budget does not cover another release of 'loss': 2 releases have spent
    epsilon 0.8 of 1, and with it it would be 1.2.
    """

    def __init__(self, epsilon: float, delta: float = 0.0, path: str | Path | None = None) -> None:
        if not epsilon > 0 or not 0 <= delta < 1:
            raise InputError(f"A budget has epsilon > 0 and 0 <= delta < 1. Got epsilon={epsilon!r}, delta={delta!r}.")
        self.epsilon, self.delta = float(epsilon), float(delta)
        self._path = None if path is None else Path(path)
        self._releases: list[Release] = []
        self._said: dict[str, list[float]] = {}
        if self._path is not None and self._path.exists():
            self._read(self._path)

    def _read(self, path: Path) -> None:
        for number, line in enumerate(path.read_text().splitlines()):
            try:
                entry = json.loads(line)
                if "said" in entry:
                    self._said[entry["of"]] = entry["said"]
                else:
                    self._releases.append(Release(entry["kind"], entry["epsilon"], entry["rho"]))
            except (ValueError, KeyError, TypeError) as error:
                raise JournalError(
                    f"Line {number + 1} of the privacy ledger {path} cannot be read: {error}.",
                    hint="a ledger that is damaged must be treated as spent; releasing more would break its promise",
                ) from error

    def _write(self, entry: dict[str, Any]) -> None:
        if self._path is None:
            return
        with open(self._path, "a") as stream:
            stream.write(json.dumps(entry) + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    @property
    def releases(self) -> tuple[Release, ...]:
        """Everything released so far, oldest first."""
        return tuple(self._releases)

    @property
    def spent(self) -> float:
        """The epsilon of everything released so far, at the ledger's delta."""
        return composed(self._releases, self.delta)

    def charge(self, release: Release) -> None:
        """Book a release that is about to be made; BudgetError, and nothing booked, when it is not covered."""
        after = composed([*self._releases, release], self.delta)
        if after > self.epsilon * (1 + 1e-9):
            raise BudgetError(
                f"The privacy budget does not cover another release of {release.kind!r}: {len(self._releases)} "
                f"releases have spent epsilon {self.spent:.4g} of {self.epsilon:g}, and with it it would be "
                f"{after:.4g}."
            )
        self._write({"kind": release.kind, "epsilon": release.epsilon, "rho": release.rho})
        self._releases.append(release)

    # -- releases -----------------------------------------------------------------------------------------------

    def counts(self, counts: ArrayLike, noise: CountNoise, below: Below = secrets.randbelow) -> FloatArray:
        """Return a client's label counts with noise, made plausible, and book it.

        The same counts reported again are answered with the same numbers, which releases nothing; counts that have
        changed are a release of their own.
        """
        values = np.asarray(counts)
        of = hashlib.sha256(json.dumps([noise.epsilon, noise.mechanism, noise.delta, values.tolist()]).encode())
        said = self._said.get(of.hexdigest())
        if said is None:
            self.charge(noise.release)
            said = [float(v) for v in plausible(noise.noisy(values, below), float(values.sum()))]
            self._said[of.hexdigest()] = said
            self._write({"of": of.hexdigest(), "said": said})
        return np.array(said)

    def loss(self, losses: ArrayLike, noise: LossNoise, below: Below = secrets.randbelow) -> float:
        """Return the mean of a client's losses with noise, and book it; every answer is a release."""
        self.charge(noise.release)
        return noise.noisy_mean(losses, below)
