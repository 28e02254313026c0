"""All cryptography, from the package of that name: sealed boxes with HPKE, signatures with Ed25519.

Outside this module, keys are plain bytes. A key holder's secret consists of the seed of ML-KEM-768, the private key of
X25519 and the private key of Ed25519, in this order. Its public key consists of the three public keys.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, MLKEM768X25519PrivateKey, MLKEM768X25519PublicKey, Suite

# A lattice and a curve, so that an attacker must break both: ML-KEM is young, and quantum computers could break X25519.
_SUITE = Suite(KEM.MLKEM768_X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)
_SEED, _CURVE = 64, 32  # bytes of ML-KEM's seed, and of any key on a curve
_MLKEM_PUBLIC = 1184  # bytes (FIPS 203)


def fresh_secret() -> bytes:
    """Return a new secret for a key holder."""
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
    """Return ``plain`` in a box that only the key holder can open, and only together with ``about``."""
    lattice = MLKEM768PublicKey.from_public_bytes(public[:_MLKEM_PUBLIC])
    curve = X25519PublicKey.from_public_bytes(public[_MLKEM_PUBLIC : _MLKEM_PUBLIC + _CURVE])
    return _SUITE.encrypt(plain, MLKEM768X25519PublicKey(lattice, curve), info=about)


def unseal(secret: bytes, about: bytes, box: bytes) -> bytes | None:
    """Return the contents of a box; None if it was changed, or sealed for another key or ``about``."""
    lattice, curve, _ = _parts(secret)
    try:
        return _SUITE.decrypt(box, MLKEM768X25519PrivateKey(lattice, curve), info=about)
    except (InvalidTag, ValueError):
        return None


def fresh_signer() -> bytes:
    """Return a new private key for signatures."""
    return Ed25519PrivateKey.generate().private_bytes_raw()


def verifier_of(signer: bytes) -> bytes:
    """Return the public key of a private key for signatures."""
    return Ed25519PrivateKey.from_private_bytes(signer).public_key().public_bytes_raw()


def verifier_in(public: bytes) -> bytes:
    """Return the part of a key holder's public key that verifies its signatures."""
    return public[_MLKEM_PUBLIC + _CURVE :]


def sign(signer: bytes, data: bytes) -> bytes:
    """Return a signature."""
    return Ed25519PrivateKey.from_private_bytes(signer).sign(data)


def sign_as_holder(secret: bytes, data: bytes) -> bytes:
    """Return a key holder's signature."""
    return _parts(secret)[2].sign(data)


def is_signed(verifier: bytes, data: bytes, signature: bytes) -> bool:
    """Whether a signature is valid."""
    try:
        Ed25519PublicKey.from_public_bytes(verifier).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True
