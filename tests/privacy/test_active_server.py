"""A server that does not follow the protocol, against the real key holder over a connection.

It has all that a server has: the token, every statement that clients send, the public key, and as much time as it
wants. What it may get is S of what clients signed; each attack here is refused, or ends with a part of S.
"""

from __future__ import annotations

import http.client
import json
import random
from itertools import combinations
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cryptography.hazmat.primitives.hpke")

from fedcohort.core.errors import InputError, UnknownNameError
from fedcohort.privacy.scheme import ClientKey, LabelSeal, make_keys
from fedcohort.privacy.service import RemoteKeyHolder

COUNTS = np.random.default_rng(3).multinomial(300, np.full(10, 0.1), 40)


def raw(remote: RemoteKeyHolder, path: str, body: bytes) -> tuple[int, bytes]:
    """Send any request."""
    host, port = repr(remote).partition("(")[2][:-1].split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    connection.request("POST", path, body, {"Authorization": "Bearer secret-token"})
    reply = connection.getresponse()
    found = reply.status, reply.read()
    connection.close()
    return found


def test_328_chosen_ciphertexts_tell_nothing_of_the_key(federation: Any) -> None:
    """With homomorphic encryption, one request of 328 rows revealed the secret key. Now no request can."""
    found = federation(COUNTS)
    sent = found.statements()
    bits = random.Random(1)
    with found.served() as remote:
        rows = [{"client": a, "block": 0, "bytes": 131_200} for a, _ in list(combinations(found.names, 2))[:328]]
        head = json.dumps({"blocks": [found.names[:1]], "rows": rows, "sizes": dict.fromkeys(found.names, 6_630_000)})
        status, _ = raw(remote, "/v1/open", head.encode() + b"\n" + bytes(1000))
        assert status == 404
        answers = set()
        for first in range(0, 328, 40):  # the boxes that clients sent, each with another bit flipped
            for keys in (
                {n: ClientKey.fresh() for n in found.names},
                found.keys,
            ):  # of the server; of clients that help
                turned = {}
                for name in found.names[: min(40, 328 - first)]:
                    box = bytearray(sent[name].partition(b"\n")[2])
                    place = bits.randrange(8 * len(box))
                    box[place // 8] ^= 1 << place % 8
                    turned[name] = found.forged(name, b"", 300, keys[name], bytes(box))
                refused = remote.admit(turned)
                assert refused.keys() == turned.keys()
                answers |= {why.replace(repr(name), "NAME") for name, why in refused.items()}
        assert answers == {  # always the same two messages, whatever is in the box
            "The statement of client NAME is not signed with the key it is enrolled with.",
            "The sealed label counts of client NAME cannot be opened.",
        }
        with pytest.raises(UnknownNameError):
            remote.products(found.names[:1], found.names[:1])


def test_puppets_in_the_place_of_clients_are_refused(federation: Any) -> None:
    """Clients with one class each; with ten of them, the server could read all counts by class."""
    found = federation(COUNTS)
    puppets = found.names[30:]
    sent = found.statements()
    for name, row in zip(puppets, 300 * np.eye(10, dtype=int), strict=True):
        sent[name] = LabelSeal(found.public, ClientKey.fresh()).seal(name, row)
    with found.served() as remote:
        refused = remote.admit({**sent, "one-more": sent[puppets[0]]})
        assert refused.keys() == {*puppets, "one-more"}
        for name in puppets:
            with pytest.raises(UnknownNameError, match=name):
                remote.products([name], found.names[:30])


def test_sizes_are_the_clients_own(federation: Any) -> None:
    found = federation(COUNTS)
    statement = found.statement("client-0")
    with found.served() as remote:
        for size in (b"0", b"299", b"100000", b"6630000", b"-1", b"1e2", b'"300"', b"null"):
            changed = statement.replace(b'"size": 300', b'"size": ' + size)
            assert changed != statement
            assert remote.admit({"client-0": changed}).keys() == {"client-0"}
        assert remote.admit({"client-0": statement}) == {}


def test_replays_and_other_keys_open_nothing(federation: Any) -> None:
    """A statement is for one client and one key; repeated, it is the same entry of S."""
    found = federation(COUNTS)
    before = federation(COUNTS[::-1], names=found.names)  # the same clients under an earlier key
    for name in found.names:
        before.keys[name] = found.keys[name]
    sent = found.statements()
    with found.served() as remote:
        assert remote.admit(before.statements()).keys() == set(found.names)  # nothing for another key
        assert remote.admit({"client-1": sent["client-0"]}).keys() == {"client-1"}  # nor from another client
        assert remote.admit(sent) == {}
        once = remote.products(found.names, found.names)
        later = {name: found.statement(name, row) for name, row in zip(found.names, COUNTS[::-1], strict=True)}
        for _ in range(3):  # even if a client signs again and again, it is opened only once
            assert remote.admit(later) == {}
            assert np.array_equal(remote.products(found.names, found.names), once)
        # A key made by the server has another fingerprint, for every client and for the key holder.
        mine = LabelSeal(make_keys(10).public, found.keys["client-0"]).seal("client-0", COUNTS[0])
        assert "for the key" in remote.admit({"client-0": mine})["client-0"]


def test_every_set_tells_a_part_of_the_same_matrix(federation: Any) -> None:
    """Sets that differ by one client, rows without the diagonal, new clients one by one: it learns only S."""
    found = federation(COUNTS[:7])
    rng = random.Random(5)
    told: dict[tuple[str, str], set[int]] = {}
    with found.served() as remote:
        for number, name in enumerate(found.names, start=1):
            remote.admit(found.statements(name))
            there = found.names[:number]
            for _ in range(10):
                rows = rng.sample(there, rng.randint(1, number))
                columns = rng.sample(there, rng.randint(1, number))
                for i, row in zip(rows, remote.products(rows, columns), strict=True):
                    for j, value in zip(columns, row, strict=True):
                        told.setdefault((min(i, j), max(i, j)), set()).add(int(value))
        with pytest.raises(InputError, match="different"):
            remote.products(["client-0", "client-0"], ["client-1"])
    assert all(len(values) == 1 for values in told.values())
    place = found.names.index
    assert all(values == {found.gram[place(i), place(j)]} for (i, j), values in told.items())
    assert len(told) <= 7 * 8 // 2  # there are this many pairs, and no more to know


def test_clients_see_who_else_is_in_the_set(federation: Any) -> None:
    """Clients that compare their sets detect a server that keeps one out, or shows it another federation's set."""
    found = federation(COUNTS[:4])
    with found.served() as remote:
        remote.admit(found.statements())
        words = remote.confirm(found.names)
        sets = {
            name: found.seal(name).confirm(name, row, words[name])
            for name, row in zip(found.names, COUNTS, strict=False)
        }
        assert len(set(sets.values())) == 1
        with pytest.raises(InputError, match="of client 'client-1'"):
            found.seal("client-0").confirm("client-0", COUNTS[0], words["client-1"])
        with pytest.raises(InputError, match="signed"):
            found.seal("client-0").confirm(
                "client-0", COUNTS[0], words["client-0"].replace(b'"clients": 4', b'"clients": 9')
            )


@pytest.mark.parametrize(("max_samples", "classes_read"), [(20_000, 3), (16_000, 2), (128, 1)])
def test_what_one_client_that_lies_reads_is_bounded_by_its_size(
    federation: Any, max_samples: int, classes_read: int
) -> None:
    """With counts 1, 128, 16384, one lying client reads three classes of all others, if it may state that many."""
    counts = np.random.default_rng(1).multinomial(100, np.full(10, 0.1), 12)
    lie = [128**k if k < classes_read else 0 for k in range(10)]
    counts[0] = lie
    found = federation(counts, max_samples=max_samples)
    assert found.holder.admit(found.statements()) == {}
    products = found.holder.products(found.names[1:], ["client-0"]).ravel()
    read = np.array([[int(p) // 128**k % 128 for k in range(classes_read)] for p in products])
    assert np.array_equal(read, counts[1:, :classes_read])
    greedy = [*lie[:classes_read], 128**classes_read, *lie[classes_read + 1 :]]
    with pytest.raises(InputError, match="at most"):
        found.statement("client-0", greedy)
    plain = bytes(32) + np.array(greedy, "<u8").tobytes()
    assert "samples. Got" in found.holder.admit({"client-0": found.forged("client-0", plain, sum(greedy))})["client-0"]
