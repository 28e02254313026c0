"""The leakage meter: runs the attacks on a federation and says who learns what under each way to share labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from fedcohort.core.arrays import BoolArray, FloatArray, IntArray
from fedcohort.core.errors import InputError
from fedcohort.core.validate import instance, listing, number, numbers, texts, whole_number
from fedcohort.privacy.attacks import (
    Recovered,
    exact,
    from_factor,
    from_products,
    from_sybils,
    guess_bound,
    name_classes,
    share_error,
    sybil_counts,
)
from fedcohort.privacy.noise import GeometricNoise, fit_counts
from fedcohort.selectors.numerics.label_shares import by_moments, by_relative_softmax

_CLOSE = 0.1  # total variation below which shares count as known


@dataclass(frozen=True, eq=False)
class AttackFinding:
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
class Exposure:
    """One way to share labels: what each observer learns, and a verdict in a sentence."""

    option: str
    findings: tuple[AttackFinding, ...]
    verdict: str


@dataclass(frozen=True, eq=False)
class Audit:
    """All exposures of one federation.

    Attributes
    ----------
    names : tuple of str
        The clients.
    ignorance : (N,) array
        Error of an observer who knows only the label shares of all clients together.
    """

    names: tuple[str, ...]
    ignorance: FloatArray
    exposures: tuple[Exposure, ...]


def audit(
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
        Budgets of the noisy option to try.
    coalition : int
        How many clients collude with the server; the sybil attack adds B clients of its own.
    updates : (N, B) array, optional
        Each client's update of the output layer's bias in one local training, if updates are sent in the clear.
    step : float
        Learning rate times local steps of that training.
    """
    found = numbers(counts, "'counts'")
    budgets = [number(epsilon, "'epsilons'") for epsilon in listing(epsilons, "'epsilons'", "numbers")]
    if names is not None:
        names = texts(names, "'names'")
    whole_number(coalition, "'coalition'")
    number(step, "'step'")
    instance(rng, np.random.Generator, "'rng'")
    if found.ndim != 2 or (found != np.rint(found)).any() or (found < 0).any():
        raise InputError(f"The audit takes whole label counts, (N, B). Got an array of shape {found.shape}.")
    truth = found.astype(np.int64)
    n = len(truth)
    if not 1 <= coalition <= n:
        raise InputError(f"A coalition has 1 to {n} clients. Got {coalition}.")
    traitors = rng.choice(n, coalition, replace=False)
    shared = truth.sum(axis=0) / max(int(truth.sum()), 1)
    nothing = Recovered(np.outer(truth.sum(axis=1), shared), named=True)
    look = _Attacker(truth, traitors, nothing, rng)
    exposures = [look.counts(), look.encrypted(), look.rotated()]
    exposures += [look.noisy(epsilon) for epsilon in budgets]
    if updates is not None:
        exposures.append(look.updates(numbers(updates, "'updates'"), step))
    return Audit(
        tuple(names) if names is not None else tuple(map(str, range(n))),
        share_error(nothing, truth),
        tuple(exposures),
    )


class _Attacker:
    """Runs the attacks on one federation, as each observer could."""

    def __init__(self, truth: IntArray, traitors: IntArray, nothing: Recovered, rng: np.random.Generator) -> None:
        self.truth, self.traitors, self.nothing, self.rng = truth, traitors, nothing, rng
        self.sizes = truth.sum(axis=1)
        self.classes = truth.shape[1]
        self.some = f"{len(traitors)} client{'s' * (len(traitors) != 1)}"
        self.friends = f"server and {self.some}"
        self.known = {int(c): truth[c] for c in traitors}

    def finding(self, observer: str, attack: str, found: Recovered | None) -> AttackFinding:
        result = self.nothing if found is None else found
        attack = f"{attack}: fails" if found is None else attack
        return AttackFinding(observer, attack, share_error(result, self.truth), exact(result, self.truth), result.named)

    def blind(self, observer: str, why: str) -> AttackFinding:
        return AttackFinding(
            observer, why, share_error(self.nothing, self.truth), exact(self.nothing, self.truth), True
        )

    def counts(self) -> Exposure:
        everything = Recovered(self.truth.astype(np.float64), named=True)
        findings = (
            self.finding("server", "reads the counts", everything),
            self.blind(f"{self.some} without the server", "sees nothing of the others"),
        )
        return Exposure("counts in the clear", findings, "Open: the server sees the label counts of all clients.")

    def _products(self) -> tuple[AttackFinding, AttackFinding, AttackFinding]:
        gram = self.truth @ self.truth.T
        found = from_products(gram, self.sizes, self.classes)
        how = "lattice of whole counts from S"
        if found is None:
            found = from_factor(gram, self.sizes, self.classes, self.rng)
            how = "factor of S, not negative, known sums"
        # Ten sybils for ten classes: their rows of S are all that is needed.
        sybils = np.array(sybil_counts(self.classes, max(1, int(np.median(self.sizes)))))
        solved = from_sybils(sybils @ self.truth.T, sybils)
        return (
            self.finding("server", how, found),
            self.finding(self.friends, f"{how}, named by the coalition's own counts", name_classes(found, self.known)),
            self.finding(f"server and {self.classes} sybils", "one linear system", solved),
        )

    def encrypted(self) -> Exposure:
        server, friends, sybils = self._products()
        holder = AttackFinding("key holder", server.attack, server.error, server.exact, server.named)
        both = self.finding(
            "server and key holder", "decrypt everything", Recovered(self.truth.astype(np.float64), named=True)
        )
        clients = self.blind(f"{self.some} without the server", "sees nobody else's ciphertext")
        return Exposure(
            "encrypted, S at the server",
            (server, holder, friends, sybils, both, clients),
            f"{_products_verdict(server, sybils)} Encryption protects against everybody who does not see S.",
        )

    def rotated(self) -> Exposure:
        server, _, sybils = self._products()
        one = self.finding(
            "server and 1 client", "the client knows the rotation", Recovered(self.truth.astype(np.float64), named=True)
        )
        return Exposure(
            "secret rotation",
            (server, one, sybils),
            f"{_products_verdict(server, sybils)} One client that tells the server the seed exposes all clients.",
        )

    def noisy(self, epsilon: float) -> Exposure:
        noise = GeometricNoise(epsilon=epsilon)
        seen = np.array([noise.simulate(row, self.rng) for row in self.truth])
        likely = np.array([fit_counts(row, q) for row, q in zip(seen, self.sizes, strict=True)])
        sybils = np.array(sybil_counts(self.classes, 1))
        # Sybils see products with noisy counts: the noise is in what they solve for.
        solved = from_sybils(sybils @ seen.T, sybils).counts
        solved = np.array([fit_counts(row, q) for row, q in zip(solved, self.sizes, strict=True)])
        server = self.finding("server", "nearest possible counts", Recovered(likely, named=True))
        findings = (
            server,
            self.finding(f"server and {self.classes} sybils", "one linear system", Recovered(solved, True)),
        )
        return Exposure(
            f"noisy counts, epsilon {epsilon:g}",
            findings,
            f"Bounded: any observer guesses a single sample's label right at most {guess_bound(epsilon):.0%} of the "
            f"time when two are in question; shares are still known to {server.mean_error:.2f} on average.",
        )

    def updates(self, updates: FloatArray, step: float) -> Exposure:
        estimates = {
            "update of the output bias, moments": by_moments(updates, step),
            "update of the output bias, softmax (HiCS-FL)": by_relative_softmax(updates, 0.5),
        }
        findings = tuple(
            self.finding("server", how, Recovered(shares * self.sizes[:, None], named=True))
            for how, shares in estimates.items()
        )
        # An attacker finds out which is better by trying both on its own data.
        finding = min(findings, key=lambda f: f.mean_error)
        close = float((finding.error < _CLOSE).mean())
        better = finding.mean_error < 0.5 * float(share_error(self.nothing, self.truth).mean())
        sentence = (
            f"shares of {close:.0%} of clients are known to {_CLOSE:g} from a single update (on average to "
            f"{finding.mean_error:.2f}; knowing nothing gives {share_error(self.nothing, self.truth).mean():.2f})."
        )
        return Exposure(
            "updates in the clear, labels never asked for",
            findings,
            f"Moot: {sentence} Whatever is done to counts, aggregate updates securely as well."
            if better
            else f"Little: {sentence}",
        )


def _products_verdict(server: AttackFinding, sybils: AttackFinding) -> str:
    if server.exact_share > 0.5:
        return (
            f"Broken: S alone gives the server the exact counts of {server.exact_share:.0%} of clients, up to the "
            f"names of the classes; with as many sybils as classes {sybils.exact_share:.0%}, names included."
        )
    return (
        f"Broken by sybils: what was tried on S alone leaves an error of {server.mean_error:.2f}, but as many "
        f"sybils as classes find the exact counts of {sybils.exact_share:.0%} of clients."
    )
