"""Simulate how clients share information about their labels, and what that costs in time and bytes.

The simulator runs the code of a live federation in memory: it creates keys, seals, signs and opens counts, and computes
products. The cost is charged as a query before the first round.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedcohort.core.arrays import IntArray
from fedcohort.core.clients import LabelCounts, LabelFactor, LabelGram, LabelInfo
from fedcohort.core.errors import InputError
from fedcohort.core.params import Interval, OneOf, Parameterized, param
from fedcohort.core.registry import Registry
from fedcohort.privacy.noise import CountNoise, GaussianNoise, GeometricNoise, fit_counts
from fedcohort.privacy.rotation import SecretRotation


@dataclass(frozen=True)
class LabelKnowledge:
    """What the server knows about labels, and what that cost.

    Parameters
    ----------
    labels : LabelInfo or None
        None if the server knows nothing.
    seconds : float
        From the first client's start until the server has the result.
    client_seconds : float
        Compute time of all clients together.
    bytes_up : int
        Bytes from clients to the server. Keys are not counted; they come with the software.
    """

    labels: LabelInfo | None
    seconds: float = 0.0
    client_seconds: float = 0.0
    bytes_up: int = 0


@dataclass(frozen=True, kw_only=True)
class LabelSharing(Parameterized, ABC):
    """A way of sharing labels with the server, chosen in the section ``[labels]``."""

    name: ClassVar[str]

    @abstractmethod
    def share(self, counts: IntArray, rng: np.random.Generator) -> LabelKnowledge:
        """Return what the server learns about (N, B) label counts."""


LABEL_SHARING: Registry[LabelSharing] = Registry("label sharing")


@LABEL_SHARING.register("counts")
class _PlainCounts(LabelSharing):
    """Clients send their label counts unchanged."""

    def share(self, counts: IntArray, rng: np.random.Generator) -> LabelKnowledge:
        """Return the counts; like the sizes, they cost nothing."""
        return LabelKnowledge(LabelCounts(counts))


@LABEL_SHARING.register("none")
class _NoLabels(LabelSharing):
    """Clients share nothing about labels, for selectors that need nothing."""

    def share(self, counts: IntArray, rng: np.random.Generator) -> LabelKnowledge:
        """Return nothing."""
        return LabelKnowledge(None)


@LABEL_SHARING.register("rotated")
class _RotatedCounts(LabelSharing):
    """Clients rotate their counts with a shared secret; the server gets a factor of S."""

    def share(self, counts: IntArray, rng: np.random.Generator) -> LabelKnowledge:
        """Return the factor."""
        rotation = SecretRotation(rng.bytes(32), counts.shape[1])
        return LabelKnowledge(LabelFactor(counts @ rotation.matrix, counts.shape[1]), bytes_up=8 * counts.size)


@LABEL_SHARING.register("noisy")
@dataclass(frozen=True, kw_only=True)
class NoisyCounts(LabelSharing):
    """Clients add noise to their counts: one release with differential privacy."""

    epsilon: float = param(1.0, Interval(float, 0, None, "neither"), "of one release (epsilon)")
    mechanism: Literal["geometric", "gaussian"] = param(
        "geometric", OneOf(("geometric", "gaussian")), "kind of noise; only gaussian uses delta"
    )
    delta: float = param(1e-5, Interval(float, 0, 1, "neither"), "of one release with gaussian noise (delta)")

    def share(self, counts: IntArray, rng: np.random.Generator) -> LabelKnowledge:
        """Return the counts with noise, fitted to their size."""
        noise: CountNoise = GeometricNoise(epsilon=self.epsilon)
        if self.mechanism == "gaussian":
            noise = GaussianNoise(epsilon=self.epsilon, delta=self.delta)
        # Noise makes counts negative or larger than a client; its size is public, so they can be fitted to it.
        rows = [fit_counts(noise.simulate(row, rng), float(row.sum())) for row in counts]
        return LabelKnowledge(LabelCounts(rows), bytes_up=8 * counts.size)


@LABEL_SHARING.register("encrypted")
class _EncryptedCounts(LabelSharing):
    """Clients seal and sign their counts, and a key holder reveals S exactly (extra keyholder)."""

    def share(self, counts: IntArray, rng: np.random.Generator) -> LabelKnowledge:
        """Return S and its measured cost. Clients seal in parallel, before the server and the key holder work."""
        from fedcohort.privacy.keyholder import KeyHolder
        from fedcohort.privacy.label_decoders import EncryptedLabels
        from fedcohort.privacy.scheme import MAX_SIZE, ClientKey, LabelSeal, make_keys, parse_clients

        if not len(counts):
            raise InputError("There are no clients, so there are no label counts to seal.")
        # Keys are made before the clock starts, because they are made once and used in every round.
        keys = {str(i): ClientKey.fresh() for i in range(len(counts))}
        secret = make_keys(counts.shape[1], MAX_SIZE)
        seals = {name: LabelSeal(secret.public, key) for name, key in keys.items()}
        holder = KeyHolder(secret, parse_clients(f"{name} {key.public}" for name, key in keys.items()))
        began = time.perf_counter()
        sealed = {name: seal.seal(name, row) for (name, seal), row in zip(seals.items(), counts, strict=True)}
        # Measured and not modelled: sealing is real work, and the machine it runs on is the only one we have.
        clients = time.perf_counter() - began
        began = time.perf_counter()
        sizes = {name: int(row.sum()) for name, row in zip(keys, counts, strict=True)}
        labels = EncryptedLabels(secret.public, holder).open(sealed, sizes, ())
        server = time.perf_counter() - began
        assert isinstance(labels, LabelGram)
        size = sum(map(len, sealed.values()))
        return LabelKnowledge(labels, clients / len(counts) + server, clients, size)
