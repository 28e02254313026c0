"""The cryptography that is used, all of it from the package of that name: boxes by HPKE, signatures by Ed25519.

Secrets and public keys are plain bytes outside of this module. A key holder's secret is the seed of ML-KEM-768, the
private key of X25519 and that of Ed25519, one after the other; its public key are their public halves.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, MLKEM768X25519PrivateKey, MLKEM768X25519PublicKey, Suite

# Both a lattice and a curve, so that a box stays shut unless both are broken: ML-KEM is young, and X25519 falls to
# quantum computers.
_SUITE = Suite(KEM.MLKEM768_X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)
_SEED, _CURVE = 64, 32  # bytes of ML-KEM's seed, and of every key on a curve
_MLKEM_PUBLIC = 1184  # bytes (FIPS 203)


def fresh_secret() -> bytes:
    """Return a key holder's new secret."""
    parts = (MLKEM768PrivateKey.generate(), X25519PrivateKey.generate(), Ed25519PrivateKey.generate())
    return b"".join(part.private_bytes_raw() for part in parts)


def _parts(secret: bytes) -> tuple[MLKEM768PrivateKey, X25519PrivateKey, Ed25519PrivateKey]:
    return (
        MLKEM768PrivateKey.from_seed_bytes(secret[:_SEED]),
        X25519PrivateKey.from_private_bytes(secret[_SEED : _SEED + _CURVE]),
        Ed25519PrivateKey.from_private_bytes(secret[_SEED + _CURVE :]),
    )


def public_of(secret: bytes) -> bytes:
    """Return the public key of a key holder's secret."""
    return b"".join(part.public_key().public_bytes_raw() for part in _parts(secret))


def seal(public: bytes, about: bytes, plain: bytes) -> bytes:
    """Return a box for a key holder; it opens only together with ``about``."""
    lattice = MLKEM768PublicKey.from_public_bytes(public[:_MLKEM_PUBLIC])
    curve = X25519PublicKey.from_public_bytes(public[_MLKEM_PUBLIC : _MLKEM_PUBLIC + _CURVE])
    return _SUITE.encrypt(plain, MLKEM768X25519PublicKey(lattice, curve), info=about)


def unseal(secret: bytes, about: bytes, box: bytes) -> bytes | None:
    """Return what is in a box; None when it is not as it was sealed, or not for this key and ``about``."""
    lattice, curve, _ = _parts(secret)
    try:
        return _SUITE.decrypt(box, MLKEM768X25519PrivateKey(lattice, curve), info=about)
    except (InvalidTag, ValueError):
        return None


def fresh_signer() -> bytes:
    """Return a new secret for signatures."""
    return Ed25519PrivateKey.generate().private_bytes_raw()


def verifier_of(signer: bytes) -> bytes:
    """Return what signatures of ``signer`` are checked with."""
    return Ed25519PrivateKey.from_private_bytes(signer).public_key().public_bytes_raw()


def verifier_in(public: bytes) -> bytes:
    """Return what signatures of a key holder are checked with."""
    return public[_MLKEM_PUBLIC + _CURVE :]


def sign(signer: bytes, data: bytes) -> bytes:
    """Return a signature."""
    return Ed25519PrivateKey.from_private_bytes(signer).sign(data)


def sign_as_holder(secret: bytes, data: bytes) -> bytes:
    """Return a key holder's signature."""
    return _parts(secret)[2].sign(data)


def is_signed(verifier: bytes, data: bytes, given: bytes) -> bool:
    """Whether a signature is right."""
    try:
        Ed25519PublicKey.from_public_bytes(verifier).verify(given, data)
    except (InvalidSignature, ValueError):
        return False
    return True
