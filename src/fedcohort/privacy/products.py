r"""The server's side: inner products of ciphertexts, without a key that opens any.

Up to n/P clients are packed into one ciphertext, client j at x^{k_j}. Packing merges ciphertexts two by two,

.. math:: \text{merged} = (a + x^s b) + \sigma(a - x^s b),

with the Galois maps :math:`\sigma` that fix y (Chen, Dai, Kim, Song 2021, "Efficient homomorphic conversion", Alg. 2).
All of them together project onto what a client is allowed to send: a client that writes into coefficients that are not
its own loses them, and cannot move anybody else's products. One product with such a block then gives a client's whole
row; no rotation is needed, and one map per client in all.

What goes to the key holder carries the products and nothing else. A uniformly random plaintext covers every other
coefficient, and a fresh encryption of zero, multiplied twice by random plaintexts, drowns the noise (2^33 times
larger than what the product left) and the ciphertext itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedcohort.errors import CiphertextError
from fedcohort.privacy.scheme import (
    DEGREE,
    INVERSION,
    EvaluationKey,
    capacity,
    coefficient,
    dumped,
    loaded,
    polynomial,
    projections,
    random_polynomial,
    scheme,
    sealapi,
    unsealed_form,
)

_FRAGMENTS = 8  # blocks that are not full before their clients are packed anew


@dataclass(frozen=True)
class Row:
    """The encrypted inner products of one client with a block of clients.

    Parameters
    ----------
    client : str
    block : tuple of str
        With whom, in the order they are packed.
    body : bytes
        A ciphertext that holds these products, and randomness everywhere else.
    """

    client: str
    block: tuple[str, ...]
    body: bytes


@dataclass
class Block:
    """The ciphertexts of some clients packed into one, so that another's products with all of them are one product."""

    names: tuple[str, ...]
    packed: Any = field(repr=False)  # with y replaced by 1/y


def places(members: int, classes: int) -> list[int]:
    """Return the power of x at which each client's products with a block are found."""
    width = capacity(classes).bit_length() - 1
    shifts = (int(format(j, f"0{width}b")[::-1], 2) if width else 0 for j in range(members))
    return [(DEGREE - shift) % DEGREE for shift in shifts]


def read_products(plain: Any, members: int, classes: int) -> list[int]:
    """Return the inner products in a decrypted row."""
    modulus = scheme().modulus
    unscale = pow(capacity(classes), -1, modulus)  # every merge doubles
    found = []
    for place in places(members, classes):
        value = coefficient(plain, place)
        found.append((value if place == 0 else -value) * unscale % modulus)  # x^-k = -x^(n-k)
    return found


class SealedLabels:
    """The ciphertexts of a federation, and the products that are still to be opened.

    Parameters
    ----------
    key : EvaluationKey

    Attributes
    ----------
    blocks : list of Block
        Everybody who is here, packed.
    """

    def __init__(self, key: EvaluationKey) -> None:
        self.key = key
        self.classes = key.public.classes
        self._relinearization = loaded("RelinKeys", key.relinearization, "The evaluation key")
        self._galois = loaded("GaloisKeys", key.galois, "The evaluation key")
        self._elements = projections(self.classes)
        self._ciphertexts: dict[str, Any] = {}
        self._digests: dict[bytes, str] = {}
        self.blocks: list[Block] = []

    @property
    def names(self) -> tuple[str, ...]:
        """Whose ciphertexts are here."""
        return tuple(self._ciphertexts)

    def check(self, client: str, sealed: bytes) -> Any:
        """Return the ciphertext a client sent if it can be used; nothing is changed."""
        ciphertext = unsealed_form(self.key.public, client, sealed)
        owner = self._digests.get(_digest(sealed), client)
        if owner != client:
            raise CiphertextError(f"The sealed label counts of client {client!r} were sent by client {owner!r} before.")
        if client in self._ciphertexts:
            raise CiphertextError(
                f"Client {client!r} has sent its sealed label counts already; a second set would open its products "
                "again."
            )
        return ciphertext

    def admit(self, sealed: Mapping[str, bytes]) -> None:
        """Take ciphertexts whose products are known already, for those of later clients with them.

        Parameters
        ----------
        sealed : mapping of name to bytes
            What :meth:`PublicKey.seal` made. One that is refused leaves everything as it was.
        """
        news = {name: self.check(name, data) for name, data in sealed.items()}
        digests = {_digest(data): name for name, data in sealed.items()}
        if len(digests) < len(sealed):
            twice = next(name for name, data in sealed.items() if digests[_digest(data)] != name)
            raise CiphertextError(f"The sealed label counts of client {twice!r} are a copy of another client's.")
        names, most = list(news), capacity(self.classes)
        self.blocks = [
            *self._tidied(),
            *(self._block({n: news[n] for n in names[i : i + most]}) for i in range(0, len(names), most)),
        ]
        self._ciphertexts.update(news)
        self._digests.update(digests)

    def rows(self, sealed: Mapping[str, bytes]) -> list[Row]:
        """Take the ciphertexts of new clients and return their rows: products with everybody there, and one another."""
        self.admit(sealed)
        found = []
        for at, block in enumerate(self.blocks):
            if block.names[0] not in sealed:
                continue
            others = [b for k, b in enumerate(self.blocks) if k >= at or b.names[0] not in sealed]
            for name in block.names:
                found += [self._row(name, other) for other in others]
        return found

    def forget(self, clients: Sequence[str]) -> None:
        """Drop clients, for example those whose products were refused; everybody else's rows stay as they are."""
        gone = set(clients)
        self._ciphertexts = {n: c for n, c in self._ciphertexts.items() if n not in gone}
        self._digests = {d: n for d, n in self._digests.items() if n not in gone}
        kept = []
        for block in self.blocks:
            if gone.isdisjoint(block.names):
                kept.append(block)
            elif rest := {n: self._ciphertexts[n] for n in block.names if n not in gone}:
                kept.append(self._block(rest))
        self.blocks = kept

    def _tidied(self) -> list[Block]:
        most = capacity(self.classes)
        partial = [block for block in self.blocks if len(block.names) < most]
        if len(partial) <= _FRAGMENTS:
            return self.blocks
        names = [name for block in partial for name in block.names]
        parts = [names[start : start + most] for start in range(0, len(names), most)]
        full = [block for block in self.blocks if len(block.names) == most]
        return [*full, *(self._block({n: self._ciphertexts[n] for n in part}) for part in parts)]

    # -- on ciphertexts -------------------------------------------------------------------------------------------

    def _block(self, members: Mapping[str, Any]) -> Block:
        level = list(members.values())
        for step, element in enumerate(self._elements):
            shift = sealapi().Plaintext(f"1x^{capacity(self.classes) >> (step + 1)}")
            level = [
                self._merged(level[i], level[i + 1] if i + 1 < len(level) else None, shift, element)
                for i in range(0, len(level), 2)
            ]
        return Block(tuple(members), self._mapped(level[0], INVERSION))

    def _mapped(self, ciphertext: Any, element: int) -> Any:
        result = sealapi().Ciphertext(scheme().context)
        scheme().evaluator.apply_galois(ciphertext, element, self._galois, result)
        return result

    def _merged(self, a: Any, b: Any | None, shift: Any, element: int) -> Any:
        evaluator = scheme().evaluator
        if b is None:
            result = self._mapped(a, element)
            evaluator.add_inplace(result, a)
            return result
        shifted, difference = (sealapi().Ciphertext(scheme().context) for _ in range(2))
        evaluator.multiply_plain(b, shift, shifted)
        evaluator.sub(a, shifted, difference)
        evaluator.add_inplace(shifted, a)
        result = self._mapped(difference, element)
        evaluator.add_inplace(result, shifted)
        return result

    def _row(self, client: str, block: Block) -> Row:
        covered = self.covered(self.product(client, block), len(block.names))
        scheme().evaluator.mod_switch_to_inplace(covered, scheme().context.last_parms_id())
        return Row(client, block.names, dumped(covered))

    def product(self, client: str, block: Block) -> Any:
        """Return the ciphertext in which a client's inner products with a block stand, as the product left it."""
        product = sealapi().Ciphertext(scheme().context)
        scheme().evaluator.multiply(self._ciphertexts[client], block.packed, product)
        scheme().evaluator.relinearize_inplace(product, self._relinearization)
        return product

    def covered(self, product: Any, members: int) -> Any:
        """Return a product with fresh noise, far larger, and random coefficients wherever no inner product stands."""
        evaluator = scheme().evaluator
        hidden = sealapi().Ciphertext(scheme().context)
        self.key.public.encryptor.encrypt_zero(hidden)
        for _ in range(2):
            evaluator.multiply_plain_inplace(hidden, random_polynomial())
        evaluator.add_inplace(hidden, product)
        cover = random_polynomial()
        evaluator.add_plain_inplace(hidden, cover)
        kept = {place: coefficient(cover, place) for place in places(members, self.classes)}
        evaluator.sub_plain_inplace(hidden, polynomial(kept))
        return hidden


def _digest(sealed: bytes) -> bytes:
    """The ciphertext itself, whatever name stands before it."""
    return hashlib.sha256(sealed.partition(b"\n")[2]).digest()
