"""A federation's clients, key holder and server, each with only its own keys."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from fedcohort.privacy import primitives
from fedcohort.privacy.keyholder import KeyHolder
from fedcohort.privacy.scheme import ClientKey, LabelSeal, PublicKey, SecretKey, _wrap, make_keys, parse_clients
from fedcohort.privacy.service import KeyHolderServer, RemoteKeyHolder


class Federation:
    """Clients with these label counts, enrolled with a key holder."""

    def __init__(self, counts: Any, names: list[str] | None = None, max_samples: int = 100_000, **kwargs: Any) -> None:
        self.counts = np.asarray(counts, np.int64)
        self.names = names or [f"client-{i}" for i in range(len(self.counts))]
        self.sizes = {name: int(row.sum()) for name, row in zip(self.names, self.counts, strict=True)}
        self.keys = {name: ClientKey.fresh() for name in self.names}
        self.secret = make_keys(self.counts.shape[1], max_samples)
        self.public = PublicKey.from_bytes(self.secret.public.to_bytes())
        self.lines = [f"{name} {key.public}" for name, key in self.keys.items()]
        self.holder = KeyHolder(SecretKey.from_bytes(self.secret.to_bytes()), parse_clients(self.lines), **kwargs)
        self.gram = self.counts @ self.counts.T

    def seal(self, name: str) -> LabelSeal:
        return LabelSeal(self.public, self.keys[name])

    def statement(self, name: str, counts: Any = None) -> bytes:
        return self.seal(name).seal(name, self.counts[self.names.index(name)] if counts is None else counts)

    def statements(self, *names: str) -> dict[str, bytes]:
        return {name: self.statement(name) for name in names or self.names}

    def forged(
        self, name: str, plain: bytes, size: int, key: ClientKey | None = None, box: bytes | None = None
    ) -> bytes:
        """Anything with a valid signature, as somebody with a client's key but without our code could send it."""
        about = json.dumps(["fedcohort label statement", 1, self.public.name, self.public.classes, name, size])
        box = primitives.seal(self.public.body, about.encode(), plain) if box is None else box
        signed = about.encode() + hashlib.sha256(box).digest()
        fields = {
            "key": self.public.name,
            "classes": self.public.classes,
            "client": name,
            "size": size,
            "signature": primitives.sign((key or self.keys[name]).body, signed).hex(),
        }
        return _wrap("label statement", fields, box)

    @contextmanager
    def served(self, **kwargs: Any) -> Iterator[RemoteKeyHolder]:
        """The key holder over a real connection."""
        server = KeyHolderServer(self.holder, "secret-token", **kwargs)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield RemoteKeyHolder(server.url, "secret-token", authority=kwargs.get("certificate"), patience=20)
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def federation() -> type[Federation]:
    return Federation
