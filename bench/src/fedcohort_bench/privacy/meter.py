"""The leakage meter: runs the attacks on a federation and reports who learns what, for each way to share labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from fedcohort.core.arrays import BoolArray, FloatArray, IntArray
from fedcohort.core.errors import InputError
from fedcohort.privacy.noise import GeometricNoise, fit_rows
from fedcohort.selectors.numerics.label_shares import by_relative_softmax
from fedcohort_bench.privacy.attacks import (
    RecoveredCounts,
    exact,
    from_factor,
    from_products,
    from_sybils,
    guess_bound,
    name_classes,
    share_error,
    shares_by_moments,
)

_CLOSE = 0.1  # total variation below which shares count as known


@dataclass(frozen=True, eq=False)
class _AttackFinding:
    """What one observer learns.

    Attributes
    ----------
    observer : str
        "server", "key holder", "1 client", "server and 1 client", ...
    attack : str
        What the observer does.
    error : (N,) array
        Total variation distance between true and inferred label shares of each client, 0 to 1.
    exact : (N,) bool array
        Which clients' counts are known exactly.
    named : bool
        Whether the observer knows which class is which.
    """

    observer: str
    attack: str
    error: FloatArray
    exact: BoolArray
    named: bool

    @property
    def mean_error(self) -> float:
        """Mean over clients."""
        return float(self.error.mean())

    @property
    def exact_share(self) -> float:
        """Share of clients whose counts are known exactly."""
        return float(self.exact.mean())


@dataclass(frozen=True, eq=False)
class _Disclosure:
    """One way to share labels: what each observer learns, and a verdict in words."""

    option: str
    findings: tuple[_AttackFinding, ...]
    verdict: str


@dataclass(frozen=True, eq=False)
class Audit:
    """All exposures of one federation.

    Attributes
    ----------
    names : tuple of str
        The clients.
    ignorance : (N,) array
        The error of an observer who knows only the label shares of the whole federation.
    """

    names: tuple[str, ...]
    ignorance: FloatArray
    exposures: tuple[_Disclosure, ...]


def attack_all(
    counts: ArrayLike,
    *,
    names: Sequence[str] | None = None,
    epsilons: Sequence[float] = (1.0,),
    coalition: int = 1,
    updates: ArrayLike | None = None,
    step: float = 1.0,
    rng: np.random.Generator,
) -> Audit:
    """Run every attack on a federation.

    Parameters
    ----------
    counts : (N, B) whole numbers
        The true label counts of the clients.
    epsilons : sequence of float
        The budgets to try for noisy counts.
    coalition : int
        How many clients collude with the server; the sybil attack adds B more.
    updates : (N, B) array, optional
        Each client's update of the output layer's bias in one local training, if updates are sent in the clear.
    step : float
        Learning rate times local steps of that training.
    """
    values = np.asarray(counts, np.float64)
    if values.ndim != 2 or (values != np.rint(values)).any() or (values < 0).any():
        raise InputError(f"The audit takes whole label counts, (N, B). Got an array of shape {values.shape}.")
    n = len(values)
    if not 1 <= coalition <= n:
        raise InputError(f"A coalition has 1 to {n} clients. Got {coalition}.")
    attacker = _Attacker(values.astype(np.int64), rng.choice(n, coalition, replace=False), rng)
    exposures = [attacker.counts(), attacker.encrypted(), attacker.rotated()]
    exposures += [attacker.noisy(epsilon) for epsilon in epsilons]
    if updates is not None:
        exposures.append(attacker.updates(np.asarray(updates, np.float64), step))
    return Audit(tuple(names) if names is not None else tuple(map(str, range(n))), attacker.ignorance, tuple(exposures))


class _Attacker:
    """Runs the attacks on one federation, as each observer could."""

    def __init__(self, truth: IntArray, traitors: IntArray, rng: np.random.Generator) -> None:
        self.truth, self.rng = truth, rng
        self.sizes = truth.sum(axis=1)
        self.classes = truth.shape[1]
        self.coalition = f"{len(traitors)} client{'s' * (len(traitors) != 1)}"
        self.known = {int(c): truth[c] for c in traitors}
        self.everything = RecoveredCounts(truth.astype(np.float64), named=True)
        shares = truth.sum(axis=0) / max(int(truth.sum()), 1)
        self.nothing = RecoveredCounts(np.outer(self.sizes, shares), named=True)
        self.ignorance = share_error(self.nothing, truth)

    def finding(self, observer: str, attack: str, result: RecoveredCounts) -> _AttackFinding:
        error, found = share_error(result, self.truth), exact(result, self.truth)
        return _AttackFinding(observer, attack, error, found, result.named)

    def counts(self) -> _Disclosure:
        findings = (
            self.finding("server", "reads the counts", self.everything),
            self.finding(f"{self.coalition} without the server", "sees nothing of the others", self.nothing),
        )
        return _Disclosure("counts in the clear", findings, "Open: the server sees the label counts of all clients.")

    def _products(self) -> tuple[_AttackFinding, _AttackFinding, _AttackFinding]:
        """Return what the server, the server and the coalition, and the server and sybils learn from S."""
        gram = self.truth @ self.truth.T
        attack = "lattice of whole counts from S"
        found = from_products(gram, self.sizes, self.classes)
        if found is None:
            attack = "factor of S, not negative, known sums"
            found = from_factor(gram, self.sizes, self.classes, self.rng)
        # Sybils of the usual size are not conspicuous.
        sybils = max(1, int(np.median(self.sizes))) * np.eye(self.classes, dtype=np.int64)
        return (
            self.finding("server", attack, found),
            self.finding(
                f"server and {self.coalition}",
                f"{attack}, named by the coalition's own counts",
                name_classes(found, self.known),
            ),
            self._sybils(from_sybils(sybils @ self.truth.T, sybils)),
        )

    def _sybils(self, result: RecoveredCounts) -> _AttackFinding:
        return self.finding(f"server and {self.classes} sybils", "one linear system", result)

    def encrypted(self) -> _Disclosure:
        server, coalition, sybils = self._products()
        holder = replace(server, observer="key holder")
        both = self.finding("server and key holder", "decrypt everything", self.everything)
        clients = self.finding(f"{self.coalition} without the server", "sees nobody else's ciphertext", self.nothing)
        return _Disclosure(
            "encrypted, S at the server",
            (server, holder, coalition, sybils, both, clients),
            f"{_products_verdict(server, sybils)} Encryption protects against everybody who does not see S.",
        )

    def rotated(self) -> _Disclosure:
        server, _, sybils = self._products()
        one = self.finding("server and 1 client", "the client knows the rotation", self.everything)
        return _Disclosure(
            "secret rotation",
            (server, one, sybils),
            f"{_products_verdict(server, sybils)} One client that tells the server the seed exposes all clients.",
        )

    def noisy(self, epsilon: float) -> _Disclosure:
        noise = GeometricNoise(epsilon=epsilon)
        noisy = np.array([noise.simulate(row, self.rng) for row in self.truth])
        likely = RecoveredCounts(fit_rows(noisy, self.sizes), named=True)
        server = self.finding("server", "nearest possible counts", likely)
        # Sybils see products with noisy counts, so the solution contains the noise.
        sybils = np.eye(self.classes, dtype=np.int64)
        solved = from_sybils(sybils @ noisy.T, sybils).counts
        return _Disclosure(
            f"noisy counts, epsilon {epsilon:g}",
            (server, self._sybils(RecoveredCounts(fit_rows(solved, self.sizes), named=True))),
            f"Bounded: any observer guesses a single sample's label right at most {guess_bound(epsilon):.0%} of the "
            f"time when two are in question; shares are still known to {server.mean_error:.2f} on average.",
        )

    def updates(self, updates: FloatArray, step: float) -> _Disclosure:
        estimates = {
            "update of the output bias, moments": shares_by_moments(updates, step),
            "update of the output bias, softmax (HiCS-FL)": by_relative_softmax(updates, 0.5),
        }
        findings = tuple(
            self.finding("server", attack, RecoveredCounts(shares * self.sizes[:, None], named=True))
            for attack, shares in estimates.items()
        )
        # An attacker can find out which is better by trying both on its own data.
        best = min(findings, key=lambda finding: finding.mean_error)
        close = float((best.error < _CLOSE).mean())
        ignorance = float(self.ignorance.mean())
        sentence = (
            f"shares of {close:.0%} of clients are known to {_CLOSE:g} from a single update (on average to "
            f"{best.mean_error:.2f}; knowing nothing gives {ignorance:.2f})."
        )
        return _Disclosure(
            "updates in the clear, labels never asked for",
            findings,
            f"Moot: {sentence} Whatever is done to counts, aggregate updates securely as well."
            if best.mean_error < 0.5 * ignorance
            else f"Little: {sentence}",
        )


def _products_verdict(server: _AttackFinding, sybils: _AttackFinding) -> str:
    if server.exact_share > 0.5:
        return (
            f"Broken: S alone gives the server the exact counts of {server.exact_share:.0%} of clients, up to the "
            f"names of the classes; with as many sybils as classes {sybils.exact_share:.0%}, names included."
        )
    return (
        f"Broken by sybils: what was tried on S alone leaves an error of {server.mean_error:.2f}, but as many "
        f"sybils as classes find the exact counts of {sybils.exact_share:.0%} of clients."
    )
