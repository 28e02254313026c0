r"""BFV as it is used here: parameters, keys in three parts, one ciphertext per client.

A plaintext is a polynomial of Z_t[x] / (x^n + 1). A client with counts :math:`c_0 \dots c_{B-1}` encrypts
:math:`\sum_b c_b\, y^b` with :math:`y = x^{n/P}`, P the next power of two of B. The product of one client's polynomial
with another's, in which y was replaced by 1/y, has the inner product of the two counts as its constant coefficient.
Counts are integers and t has 42 bits, so products are exact as long as B * largest^2 < t, which is checked before
anything is encrypted.

Keys come in three parts, made once by the key holder: the public key for clients, the evaluation key for the server
(with the public key inside, because the server hides what it computes), the secret key for nobody else.

Encryption is always with the public key. The smaller seeded ciphertexts of symmetric encryption would need the secret
key at every client, and one client that colludes with the server would then open everybody's counts.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedcohort.arrays import IntArray
from fedcohort.errors import CiphertextError, InputError, MissingExtraError
from fedcohort.guard import guarded

DEGREE = 8192
"""n; with 218 bits of coefficient modulus this is SEAL's 128-bit security."""
_MODULUS_BITS = [60, 49, 49, 60]
_PLAIN_BITS = 42
MOST_CLASSES = 1024
_HEADER_LIMIT = 2048
CIPHERTEXT_LIMIT = 2 * DEGREE * 3 * 8 + 4096
"""Bytes of the largest ciphertext anybody has a reason to send."""
_VERSION = 1


def sealapi() -> ModuleType:
    """Return TenSEAL's binding of SEAL."""
    try:
        import tenseal.sealapi as api
    except ImportError as error:
        raise MissingExtraError(
            f"Encrypted label counts need TenSEAL, which is not installed ({error}).",
            hint="pip install 'fedcohort[he]'",
        ) from error
    return api  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Scheme:
    """SEAL's context and the tools that need no key."""

    context: Any
    evaluator: Any
    encoder: Any
    modulus: int  # t


@functools.cache
def scheme() -> Scheme:
    """Return the one parameter set everybody uses."""
    api = sealapi()
    parameters = api.EncryptionParameters(api.SCHEME_TYPE.BFV)
    parameters.set_poly_modulus_degree(DEGREE)
    parameters.set_coeff_modulus(api.CoeffModulus.Create(DEGREE, _MODULUS_BITS))
    plain = api.PlainModulus.Batching(DEGREE, _PLAIN_BITS)
    parameters.set_plain_modulus(plain)
    context = api.SEALContext(parameters, True, api.SEC_LEVEL_TYPE.TC128)
    return Scheme(context, api.Evaluator(context), api.BatchEncoder(context), int(plain.value()))


def period(classes: int) -> int:
    """Return P, the power of two not below the number of classes.

    >>> [period(b) for b in (2, 10, 16, 62)]
    [2, 16, 16, 64]
    """
    if not 2 <= classes <= MOST_CLASSES:
        raise InputError(f"Encrypted label counts are for 2 to {MOST_CLASSES} classes. Got {classes}.")
    return 1 << (classes - 1).bit_length()


def capacity(classes: int) -> int:
    """Return how many clients share one packed ciphertext, n / P."""
    return DEGREE // period(classes)


def largest_count(classes: int) -> int:
    """Return the largest count per class for which every inner product is below t."""
    return int(((scheme().modulus - 1) // classes) ** 0.5)


# -- bytes --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _file(data: bytes = b"") -> Iterator[str]:
    """SEAL reads and writes by path; give it one that never touches a disk where the system can."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("fedcohort")
        with os.fdopen(descriptor, "wb", buffering=0) as stream:
            stream.write(data)
            yield f"/proc/self/fd/{descriptor}"
    else:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "seal")
            with open(path, "wb") as stream:
                stream.write(data)
            yield path


def dumped(thing: Any) -> bytes:
    """Return a SEAL object as bytes."""
    with _file() as path:
        thing.save(path)
        with open(path, "rb") as stream:
            return stream.read()


def loaded(kind: str, data: bytes, what: str) -> Any:
    """Return the SEAL object of class ``kind`` in ``data``, which SEAL validates against the parameters."""
    thing = getattr(sealapi(), kind)() if kind != "Ciphertext" else sealapi().Ciphertext(scheme().context)
    with _file(data) as path:
        try:
            thing.load(scheme().context, path)
        except (RuntimeError, ValueError, IndexError, MemoryError) as error:
            raise CiphertextError(f"{what} cannot be read: {error}.") from error
    return thing


def wrapped(kind: str, fields: Mapping[str, Any], body: bytes) -> bytes:
    """Return ``body`` behind one line that says what it is."""
    header = {"fedcohort": kind, "version": _VERSION, **fields, "bytes": len(body)}
    return json.dumps({**header, "sha256": hashlib.sha256(body).hexdigest()}).encode() + b"\n" + body


def unwrapped(kind: str, data: bytes, what: str) -> tuple[dict[str, Any], bytes]:
    """Return the header and body :func:`wrapped` joined; anything else is refused."""
    line, newline, body = data[: _HEADER_LIMIT + 1].partition(b"\n")
    try:
        header = json.loads(line) if newline else None
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("fedcohort") != kind or header.get("version") != _VERSION:
        raise CiphertextError(f"{what} is not a {kind} of this version.")
    body = data[len(line) + 1 :]
    if header.get("bytes") != len(body):
        raise CiphertextError(f"{what} is truncated: {len(body)} bytes came of {header.get('bytes')}.")
    if header.get("sha256") != hashlib.sha256(body).hexdigest():
        raise CiphertextError(f"{what} is damaged: its checksum does not fit.")
    return header, body


# -- keys ---------------------------------------------------------------------------------------------------------


@guarded(methods=True)
@dataclass(frozen=True)
class PublicKey:
    """What a client needs to seal its counts.

    Parameters
    ----------
    classes : int
        B.
    body : bytes
        SEAL's public key.
    """

    classes: int
    body: bytes

    @functools.cached_property
    def name(self) -> str:
        """A fingerprint; every ciphertext carries it."""
        return hashlib.sha256(b"%d:" % self.classes + self.body).hexdigest()[:32]

    def to_bytes(self) -> bytes:
        """Return the key as a file's content."""
        return wrapped("public key", {"classes": self.classes}, self.body)

    @classmethod
    def from_bytes(cls, data: bytes) -> PublicKey:
        """Read what :meth:`to_bytes` wrote."""
        header, body = unwrapped("public key", data, "The public key")
        return cls(int(header["classes"]), body)

    @functools.cached_property
    def encryptor(self) -> Any:
        """SEAL's encryptor with this key."""
        return sealapi().Encryptor(scheme().context, loaded("PublicKey", self.body, "The public key"))

    def seal(self, client: str, counts: ArrayLike) -> bytes:
        """Return a client's label counts encrypted, as they travel.

        Parameters
        ----------
        client : str
            Its name in the federation.
        counts : (B,) array of whole numbers
        """
        values = checked_counts(counts, self.classes)
        stride = capacity(self.classes)
        ciphertext = sealapi().Ciphertext(scheme().context)
        self.encryptor.encrypt(polynomial({b * stride: int(c) for b, c in enumerate(values)}), ciphertext)
        fields = {"key": self.name, "classes": self.classes, "client": client}
        return wrapped("sealed labels", fields, dumped(ciphertext))


@guarded(methods=True)
@dataclass(frozen=True)
class EvaluationKey:
    """What the server needs to multiply ciphertexts: it opens nothing.

    Parameters
    ----------
    public : PublicKey
    relinearization, galois : bytes
        SEAL's keys.
    """

    public: PublicKey
    relinearization: bytes
    galois: bytes

    def to_bytes(self) -> bytes:
        """Return the key as a file's content."""
        parts = [self.public.body, self.relinearization, self.galois]
        fields = {"classes": self.public.classes, "parts": [len(part) for part in parts]}
        return wrapped("evaluation key", fields, b"".join(parts))

    @classmethod
    def from_bytes(cls, data: bytes) -> EvaluationKey:
        """Read what :meth:`to_bytes` wrote."""
        header, body = unwrapped("evaluation key", data, "The evaluation key")
        first, second, third = (int(length) for length in header["parts"])
        public = PublicKey(int(header["classes"]), body[:first])
        return cls(public, body[first : first + second], body[first + second : first + second + third])


@dataclass(frozen=True)
class SecretKey:
    """What opens ciphertexts. It stays with the key holder.

    Parameters
    ----------
    public : PublicKey
    body : bytes
        SEAL's secret key.
    """

    public: PublicKey
    body: bytes

    def __repr__(self) -> str:
        return f"SecretKey({self.public.name})"

    def to_bytes(self) -> bytes:
        """Return the key as a file's content."""
        fields = {"classes": self.public.classes, "parts": [len(self.public.body), len(self.body)]}
        return wrapped("secret key", fields, self.public.body + self.body)

    @classmethod
    def from_bytes(cls, data: bytes) -> SecretKey:
        """Read what :meth:`to_bytes` wrote."""
        header, body = unwrapped("secret key", data, "The secret key")
        first = int(header["parts"][0])
        return cls(PublicKey(int(header["classes"]), body[:first]), body[first:])

    @functools.cached_property
    def decryptor(self) -> Any:
        """SEAL's decryptor with this key."""
        return sealapi().Decryptor(scheme().context, loaded("SecretKey", self.body, "The secret key"))


def projections(classes: int) -> list[int]:
    """Return the Galois elements that fix y and, one after the other, sum everything else away."""
    first = period(classes).bit_length()  # 2^first is the least power that moves x and not y
    return [(1 << power) + 1 for power in range(first, DEGREE.bit_length())]


INVERSION = 2 * DEGREE - 1
"""The Galois element that replaces x by 1/x."""


@guarded
def make_keys(classes: int) -> tuple[SecretKey, EvaluationKey]:
    """Return fresh keys for a federation with ``classes`` classes; ``secret.public`` is for the clients."""
    api = sealapi()
    elements = [*projections(classes), INVERSION]
    generator = api.KeyGenerator(scheme().context)
    public, relinearization, galois = api.PublicKey(), api.RelinKeys(), api.GaloisKeys()
    generator.create_public_key(public)
    generator.create_relin_keys(relinearization)
    generator.create_galois_keys(elements, galois)
    shared = PublicKey(classes, dumped(public))
    secret = SecretKey(shared, dumped(generator.secret_key()))
    return secret, EvaluationKey(shared, dumped(relinearization), dumped(galois))


# -- plaintexts and ciphertexts -----------------------------------------------------------------------------------


def polynomial(coefficients: Mapping[int, int]) -> Any:
    """Return a plaintext with these coefficients."""
    terms = [f"{value:X}x^{power}" for power, value in sorted(coefficients.items(), reverse=True) if value]
    return sealapi().Plaintext(" + ".join(terms) or "0")


def random_polynomial() -> Any:
    """Return a plaintext whose coefficients are uniform below t: uniform slots, and encoding is one-to-one."""
    modulus = scheme().modulus
    mask = np.uint64((1 << modulus.bit_length()) - 1)
    values = np.frombuffer(os.urandom(8 * DEGREE), np.uint64) & mask
    numbers = values.tolist()
    for i in np.flatnonzero(values >= modulus).tolist():
        numbers[i] = secrets.randbelow(modulus)
    plain = sealapi().Plaintext()
    scheme().encoder.encode(numbers, plain)
    return plain


def coefficient(plain: Any, power: int) -> int:
    """Return one coefficient; SEAL leaves out leading zeros."""
    return int(plain.data(power)) if power < plain.coeff_count() else 0


def checked_counts(counts: ArrayLike, classes: int) -> IntArray:
    """Return label counts as whole numbers that can be sealed; anything else is refused before it is encrypted."""
    try:
        values = np.asarray(counts, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"Label counts must be numbers. Got {error}.") from None
    if values.shape != (classes,):
        raise InputError(f"The key is for {classes} classes, so there must be {classes} counts. Got {values.shape}.")
    bad = ~np.isfinite(values) | (values < 0) | (values != np.floor(values)) | (values > largest_count(classes))
    if bad.any():
        where = int(np.flatnonzero(bad)[0])
        raise InputError(
            f"Label counts must be whole numbers from 0 to {largest_count(classes)}. Got {values[where]!r} for class "
            f"{where}."
        )
    return values.astype(np.int64)


def unsealed_form(public: PublicKey, client: str, sealed: bytes) -> Any:
    """Return the ciphertext a client sent, after every check that needs no secret key.

    Raises
    ------
    CiphertextError
        When it is oversize, truncated, damaged, of another key, client or number of classes, or not a fresh ciphertext.
    """
    what = f"The sealed label counts of client {client!r}"
    if len(sealed) > CIPHERTEXT_LIMIT + _HEADER_LIMIT:
        raise CiphertextError(f"{what} are oversize: {len(sealed)} bytes, at most {CIPHERTEXT_LIMIT} are possible.")
    header, body = unwrapped("sealed labels", sealed, what)
    if header.get("classes") != public.classes:
        raise CiphertextError(f"{what} are of {header.get('classes')} classes; the federation has {public.classes}.")
    if header.get("key") != public.name:
        raise CiphertextError(
            f"{what} were sealed with the key {header.get('key')}; this federation's is {public.name}.",
            hint="give the client the key holder's public.key of this federation",
        )
    if header.get("client") != client:
        raise CiphertextError(f"{what} were sealed for client {header.get('client')!r}.")
    ciphertext = loaded("Ciphertext", body, what)
    fresh = list(ciphertext.parms_id()) == list(scheme().context.first_parms_id())
    if ciphertext.size() != 2 or not fresh or ciphertext.is_ntt_form() or ciphertext.is_transparent():
        raise CiphertextError(f"{what} are not a fresh ciphertext of two polynomials.")
    return ciphertext
