"""An operator's signature of each link of a journal (Ed25519).

The chain shows that nothing was changed since somebody kept a link. A signature shows whose link it was. The private
key is in a separate file that only its owner can read; ``fedcohort journal keygen`` writes both keys.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fedcohort.core.errors import InputError, needs_extra
from fedcohort.core.files import read_file, refuse_links

_PURPOSE = b"fedcohort journal head\0"  # a part of what is signed, so that signatures for other purposes are not valid
_MAKE_ONE = "`fedcohort journal keygen FILE` makes one"


def _library() -> tuple[Any, Any]:
    """Return the modules of ``cryptography`` for key files and for Ed25519."""
    with needs_extra("Signatures need cryptography.", "keyholder"):
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    return serialization, ed25519


class Signer:
    """Signs with the private key in a file.

    Parameters
    ----------
    path : path
        A file that :func:`generate` wrote.
    """

    def __init__(self, path: str | Path) -> None:
        serialization, ed25519 = _library()
        self._key = _read(path, "private", lambda data: serialization.load_pem_private_key(data, password=None))
        if not isinstance(self._key, ed25519.Ed25519PrivateKey):
            raise InputError(f"The private key {path} is not an Ed25519 key.", hint=_MAKE_ONE)

    @property
    def public(self) -> str:
        """The public key, in hexadecimal."""
        return str(self._key.public_key().public_bytes_raw().hex())

    def sign(self, link: bytes) -> bytes:
        """Return the signature of a link."""
        return bytes(self._key.sign(_PURPOSE + link))


def read_public(path: str | Path) -> str:
    """Return the public key in a file, in hexadecimal."""
    serialization, ed25519 = _library()
    key = _read(path, "public", serialization.load_pem_public_key)
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise InputError(f"The public key {path} is not an Ed25519 key.", hint=_MAKE_ONE)
    return str(key.public_bytes_raw().hex())


def is_signed(head: str, signature: str, public: str) -> bool:
    """Whether a link was signed with the private key that belongs to ``public``; all in hexadecimal."""
    from cryptography.exceptions import InvalidSignature

    _, ed25519 = _library()
    try:
        key = ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))
        key.verify(bytes.fromhex(signature), _PURPOSE + bytes.fromhex(head))
    except (InvalidSignature, ValueError):
        return False
    return True


def generate(path: str | Path) -> Path:
    """Write a new private key, which only its owner can read, and the public key; return the public key's file."""
    serialization, ed25519 = _library()
    path = Path(path)
    if not path.name:
        raise InputError(f"A key must be a file. Got {str(path)!r}, a folder.")
    public = path.with_name(path.name + ".pub")
    pem = serialization.Encoding.PEM
    key = ed25519.Ed25519PrivateKey.generate()
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    try:
        for file, data in (
            (path, private),
            (public, key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)),
        ):
            handle = refuse_links(str(file), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            with os.fdopen(handle, "wb") as stream:
                if file == path:
                    path.chmod(0o600)
                stream.write(data)
    except FileExistsError as error:
        raise InputError(f"The file {error.filename} already exists; a key is never overwritten.") from error
    except OSError as error:
        raise InputError(f"The key {path} cannot be written: {error.strerror or error}.") from error
    return public


def _read(path: str | Path, kind: str, load: Any) -> Any:
    try:
        return load(read_file(Path(path)))
    except OSError as error:
        raise InputError(f"The {kind} key {path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, TypeError) as error:
        raise InputError(f"The file {path} holds no {kind} key.", hint=_MAKE_ONE) from error
