"""A server that tries anything at all against the key holder: forty of them, each with another thousand of tricks."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cryptography.hazmat.primitives.hpke")

from fedcohort.core.errors import FedcohortError
from fedcohort.privacy.scheme import ClientKey, LabelSeal, make_keys

from .test_active_server import raw

CLIENTS, HELPERS, STEPS = 10, 2, 60


class Server:
    """It has the token, all statements, and the keys of two clients that help it."""

    def __init__(self, found: Any, remote: Any, seed: int) -> None:
        self.found, self.remote, self.rng = found, remote, random.Random(seed)
        self.honest, self.helpers = found.names[HELPERS:], found.names[:HELPERS]
        self.sent = found.statements()
        self.told: dict[tuple[str, str], set[int]] = {}
        self.wrong: list[str] = []

    def admit(self, statements: dict[str, bytes], *, may: bool) -> None:
        """Send statements; ``may`` says whether any of them may be accepted."""
        with contextlib.suppress(FedcohortError):
            refused = self.remote.admit(statements)
            if not may and refused.keys() != statements.keys():
                self.wrong.append(f"accepted {statements.keys() - refused.keys()}")

    def genuine(self) -> None:
        self.admit({n: self.sent[n] for n in self.rng.sample(self.found.names, self.rng.randint(1, 5))}, may=True)

    def mutated(self) -> None:
        name = self.rng.choice(self.honest)
        data = bytearray(self.sent[name])
        other = self.sent[self.rng.choice([n for n in self.found.names if n != name])]
        match self.rng.randrange(6):
            case 0:
                place = self.rng.randrange(8 * len(data))
                data[place // 8] ^= 1 << place % 8
            case 1:
                del data[self.rng.randrange(len(data)) :]
            case 2:
                data += self.rng.randbytes(self.rng.randint(1, 300))
            case 3:
                data[: data.index(b"\n")] = other[: other.index(b"\n")]
            case 4:
                data[data.index(b"\n") :] = other[other.index(b"\n") :]
            case _:
                data = bytearray(other)
        if bytes(data) != self.sent[name]:
            self.admit({name: bytes(data)}, may=False)

    def by_a_helper(self) -> None:
        """A helper signs what the server wants, under its own name or that of another."""
        name, key = self.rng.choice(self.found.names), self.found.keys[self.rng.choice(self.helpers)]
        size = self.rng.choice([0, 1, 300, -5, 2**63, 10**30])
        plain = self.rng.choice([b"", self.rng.randbytes(80), bytes(32) + np.full(10, 2**40, "<u8").tobytes()])
        with contextlib.suppress(FedcohortError, ValueError, OverflowError):
            self.admit({name: self.found.forged(name, plain, size, key)}, may=False)

    def puppets(self) -> None:
        name = self.rng.choice([*self.found.names, "somebody", ""])
        row = 300 * np.eye(10, dtype=int)[self.rng.randrange(10)]
        public = self.rng.choice([self.found.public, make_keys(10).public])
        with contextlib.suppress(FedcohortError):
            self.admit({name: LabelSeal(public, ClientKey.fresh()).seal(name, row)}, may=False)

    def products(self) -> None:
        names = [*self.found.names, "somebody"] if self.rng.random() < 0.2 else self.found.names
        rows, columns = (self.rng.choices(names, k=self.rng.randint(1, 6)) for _ in range(2))
        with contextlib.suppress(FedcohortError):
            for i, row in zip(rows, self.remote.products(rows, columns), strict=True):
                for j, value in zip(columns, row, strict=True):
                    self.told.setdefault((min(i, j), max(i, j)), set()).add(int(value))

    def noise(self) -> None:
        """Any bytes to any path; the key holder must answer, and not with an error of its own."""
        path = self.rng.choice(["/v1/open", "/v1/admit", "/v1/products", "/v1/confirm", "/", "/v1/" + "x" * 500])
        body: Any = self.rng.choice([None, [], {}, {"clients": 3}, {"rows": [[]], "columns": {}}, {"names": [1e300]}])
        data = json.dumps(body).encode() + self.rng.choice([b"", b"\n", b"\n" + self.rng.randbytes(400)])
        status, _ = raw(self.remote, path, self.rng.choice([data, self.rng.randbytes(100), b"[" * 5000]))
        if not 400 <= status < 500:
            self.wrong.append(f"{path} answered {status} to {data[:60]!r}")

    def confirm(self) -> None:
        with contextlib.suppress(FedcohortError):
            self.remote.confirm(self.rng.choices([*self.found.names, "somebody"], k=3))

    @property
    def tricks(self) -> list[Callable[[], None]]:
        return [
            self.genuine, self.mutated, self.by_a_helper, self.puppets, self.products, self.products, self.noise,
            self.confirm,
        ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_whatever_a_server_tries_it_learns_only_products_of_what_clients_signed(seed: int, federation: Any) -> None:
    counts = np.random.default_rng(seed).multinomial(300, np.full(10, 0.1), CLIENTS)
    found = federation(counts)
    with found.served() as remote:
        server = Server(found, remote, seed)
        for _ in range(STEPS):
            server.rng.choice(server.tricks)()
        # The key holder still serves, and nothing that was tried has changed what it opens.
        assert not set(remote.admit(found.statements())) & set(server.honest)
        place = [found.names.index(name) for name in server.honest]
        np.testing.assert_array_equal(remote.products(server.honest, server.honest), found.gram[np.ix_(place, place)])
    assert not server.wrong
    for (i, j), values in server.told.items():
        assert len(values) == 1, (i, j)
        if i in server.honest and j in server.honest:
            assert values == {found.gram[found.names.index(i), found.names.index(j)]}
