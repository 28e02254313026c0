"""Inner products under encryption against the products of the counts, and everything that must be refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("tenseal")

from fedcohort.errors import CiphertextError, InputError, UnknownNameError
from fedcohort.privacy.attacks import from_sybils, sybil_counts
from fedcohort.privacy.keyholder import ClientRefusedError, KeyHolder
from fedcohort.privacy.products import Row, SealedLabels, read_products
from fedcohort.privacy.scheme import (
    CIPHERTEXT_LIMIT,
    EvaluationKey,
    PublicKey,
    SecretKey,
    capacity,
    dumped,
    largest_count,
    loaded,
    make_keys,
    polynomial,
    scheme,
    sealapi,
    wrapped,
)

KEYS: dict[int, tuple[SecretKey, EvaluationKey]] = {}


def keys(classes: int) -> tuple[SecretKey, EvaluationKey]:
    if classes not in KEYS:
        KEYS[classes] = make_keys(classes)
    return KEYS[classes]


class Federation:
    """The three roles, apart: each holds only its own part of the keys."""

    def __init__(self, counts: Any) -> None:
        self.counts = np.asarray(counts, np.int64)
        secret, evaluation = keys(self.counts.shape[1])
        self.public = PublicKey.from_bytes(secret.public.to_bytes())
        self.names = [f"client-{i}" for i in range(len(self.counts))]
        self.sizes = {name: int(row.sum()) for name, row in zip(self.names, self.counts, strict=True)}
        self.server = SealedLabels(EvaluationKey.from_bytes(evaluation.to_bytes()))
        self.holder = KeyHolder(SecretKey.from_bytes(secret.to_bytes()), self.names)
        self.sealed = {n: self.public.seal(n, c) for n, c in zip(self.names, self.counts, strict=True)}

    def forged(self, client: int, coefficients: dict[int, int], public: PublicKey | None = None) -> bytes:
        """What a client could send that does not use our code: any polynomial behind a flawless header."""
        ciphertext = sealapi().Ciphertext(scheme().context)
        (public or self.public).encryptor.encrypt(polynomial(coefficients), ciphertext)
        fields = {"key": self.public.name, "classes": self.public.classes, "client": self.names[client]}
        return wrapped("sealed labels", fields, dumped(ciphertext))

    def counts_as(self, values: Any) -> dict[int, int]:
        stride, modulus = capacity(self.public.classes), scheme().modulus
        return {b * stride: int(v) % modulus for b, v in enumerate(values)}

    def run(self) -> Any:
        self.holder.open(self.server.rows(self.sealed), self.sizes)
        return self.holder.known(self.names, self.names)


@pytest.mark.parametrize("classes", [2, 3, 10, 16, 17, 62])
def test_products_are_exact(classes: int) -> None:
    rng = np.random.default_rng(classes)
    counts = rng.integers(0, 100_001, (7, classes))
    counts[0], counts[1] = 100_000, 0
    federation = Federation(counts)
    assert np.array_equal(federation.run(), counts @ counts.T)


@settings(max_examples=5, deadline=None)
@given(st.integers(2, 12), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_any_counts(classes: int, clients: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, largest_count(classes), (clients, classes)) * (rng.random((clients, classes)) < 0.5)
    assert np.array_equal(Federation(counts).run(), counts @ counts.T)


def test_more_clients_than_fit_one_block() -> None:
    classes = 600  # 8 clients share a ciphertext
    counts = np.random.default_rng(0).integers(0, 9, (11, classes))
    assert capacity(classes) == 8
    federation = Federation(counts)
    rows = federation.server.rows(federation.sealed)
    assert len(rows) == 8 * 2 + 3  # the second block's products with the first are known from the first's
    federation.holder.open(rows, federation.sizes)
    assert np.array_equal(federation.holder.known(federation.names, federation.names), counts @ counts.T)


def test_a_newcomer_costs_its_own_row() -> None:
    counts = np.random.default_rng(5).integers(0, 1000, (15, 4))
    federation = Federation(counts)
    first = {n: federation.sealed[n] for n in federation.names[:5]}
    federation.holder.open(federation.server.rows(first), federation.sizes)
    for at, name in enumerate(federation.names[5:]):
        rows = federation.server.rows({name: federation.sealed[name]})
        assert {row.client for row in rows} == {name}
        assert len(rows) <= 10  # blocks are packed anew before they become many
        assert sum(len(row.block) for row in rows) == 5 + at + 1
        federation.holder.open(rows, federation.sizes)
    assert np.array_equal(federation.holder.known(federation.names, federation.names), counts @ counts.T)


def test_the_key_holder_sees_products_and_noise() -> None:
    """Everything in an opened row but the products is uniform: the same products twice share nothing else."""
    federation = Federation([[3, 4, 0], [1, 0, 6]])
    secret = keys(3)[0]
    plains = []
    for _ in range(2):
        row = SealedLabels(keys(3)[1]).rows(federation.sealed)[0]
        plain = sealapi().Plaintext()
        secret.decryptor.decrypt(loaded("Ciphertext", row.body, "row"), plain)
        assert read_products(plain, 2, 3) == [25, 3]
        plains.append(np.array([plain.data(i) for i in range(plain.coeff_count())], np.float64))
    shortest = min(map(len, plains))
    same = np.flatnonzero(plains[0][:shortest] == plains[1][:shortest])
    assert len(same) == 2
    scaled = np.delete(plains[0], same) / scheme().modulus
    assert abs(scaled.mean() - 0.5) < 0.02 and abs(scaled.std() - 12**-0.5) < 0.01


@pytest.mark.parametrize(
    "bad", [[-1, 3, 3], [0.5, 1, 1], [np.nan, 1, 1], [np.inf, 1, 1], [1, 2], [1e9, 0, 0], ["a", 1, 1]]
)
def test_counts_that_cannot_be_sealed(bad: Any) -> None:
    with pytest.raises(InputError, match="counts"):
        keys(3)[0].public.seal("anna", bad)


def refused(federation: Federation, name: str, sealed: bytes, match: str) -> None:
    before = federation.server.names
    with pytest.raises(CiphertextError, match=match):
        federation.server.rows({**federation.sealed, name: sealed})
    assert federation.server.names == before


def test_ciphertexts_the_server_refuses() -> None:
    federation = Federation([[3, 4, 0], [1, 0, 6], [2, 2, 2]])
    good = federation.sealed["client-0"]
    refused(federation, "client-0", good[:-100], "truncated")
    refused(federation, "client-0", good[:20], "not a sealed labels")
    refused(federation, "client-0", b"", "not a sealed labels")
    refused(federation, "client-0", good[:-1] + bytes([good[-1] ^ 1]), "damaged")
    refused(federation, "client-0", good + b"\0" * CIPHERTEXT_LIMIT, "oversize")
    refused(federation, "client-0", federation.sealed["client-1"], "sealed for client 'client-1'")
    refused(federation, "client-0", make_keys(3)[0].public.seal("client-0", [1, 1, 1]), "sealed with the key")
    refused(federation, "client-0", keys(4)[0].public.seal("client-0", [1, 1, 1, 1]), "4 classes")
    refused(federation, "client-0", good.replace(b'"client": "client-0"', b'"client": "client-9"'), "'client-9'")
    # Another's ciphertext under one's own name.
    copied = federation.sealed["client-1"].replace(b"client-1", b"client-0", 1)
    refused(federation, "client-0", copied, "copy of another")
    garbage = wrapped("sealed labels", {"key": federation.public.name, "classes": 3, "client": "client-0"}, b"x" * 5000)
    refused(federation, "client-0", garbage, "cannot be read")
    transparent = sealapi().Ciphertext(scheme().context)
    transparent.resize(scheme().context, 2)
    empty = wrapped(
        "sealed labels", {"key": federation.public.name, "classes": 3, "client": "client-0"}, dumped(transparent)
    )
    refused(federation, "client-0", empty, r"not a fresh ciphertext|cannot be read")
    assert np.array_equal(federation.run(), federation.counts @ federation.counts.T)  # nothing was lost on the way
    with pytest.raises(CiphertextError, match="already"):  # and a client that comes again opens nothing again
        federation.server.rows({"client-0": federation.public.seal("client-0", [5, 1, 1])})


def test_a_client_cannot_write_into_the_places_of_others() -> None:
    federation = Federation(np.random.default_rng(2).integers(0, 500, (6, 4)))
    honest = federation.counts_as(federation.counts[2])
    junk = dict.fromkeys((1, 2, 3, 7, 8191, 4097, capacity(4) + 1), 12345)
    federation.sealed["client-2"] = federation.forged(2, {**honest, **junk})
    rows = federation.server.rows(federation.sealed)
    others = [0, 1, 3, 4, 5]
    secret = keys(4)[0]
    for row in rows:
        plain = sealapi().Plaintext()
        secret.decryptor.decrypt(loaded("Ciphertext", row.body, "row"), plain)
        i = federation.names.index(row.client)
        found = np.array(read_products(plain, 6, 4))
        if i != 2:  # nobody's row is moved, not even at the one who tried
            assert np.array_equal(found, federation.counts @ federation.counts[i])
    assert len(rows) == len(others) + 1


@pytest.mark.parametrize(
    "lie",
    [
        [-5, 10, 5],  # sums to its size, but its products with clients of class 0 are negative
        [10**9, 0, 0],
        [2**41, 7, 7],
        [3, 3, 5],  # 11 samples, not 10: the sum of squares is odd
        [0, 0, 0],
    ],
)
def test_lies_are_named_and_change_nothing(lie: list[int]) -> None:
    federation = Federation([[9, 1, 0], [10, 0, 0], [3, 3, 4], [0, 5, 5], [2, 2, 6]])
    federation.sealed["client-2"] = federation.forged(2, federation.counts_as(lie))
    rows = federation.server.rows(federation.sealed)
    with pytest.raises(ClientRefusedError, match="'client-2'") as caught:
        federation.holder.open(rows, federation.sizes)
    assert caught.value.client == "client-2"
    assert np.isnan(federation.holder.known(federation.names, federation.names)).all()
    federation.server.forget(["client-2"])
    rest = [n for n in federation.names if n != "client-2"]
    federation.server.forget(rest)
    federation.holder.open(federation.server.rows({n: federation.sealed[n] for n in rest}), federation.sizes)
    kept = np.delete(federation.counts, 2, axis=0)
    assert np.array_equal(federation.holder.known(rest, rest), kept @ kept.T)


def test_another_key_behind_a_flawless_header_is_found() -> None:
    federation = Federation([[9, 1, 0], [10, 0, 0], [3, 3, 4]])
    other = make_keys(3)[0].public
    federation.sealed["client-1"] = federation.forged(1, federation.counts_as([10, 0, 0]), other)
    with pytest.raises(CiphertextError, match="another one"):
        federation.run()
    alone = [SealedLabels(keys(3)[1]).rows({n: federation.sealed[n]})[0] for n in federation.names]
    assert federation.holder.readable(alone) == [True, False, True]


def test_what_the_key_holder_refuses() -> None:
    federation = Federation([[9, 1, 0], [10, 0, 0], [3, 3, 4], [0, 5, 5]])
    rows = federation.server.rows(federation.sealed)
    with pytest.raises(UnknownNameError, match="not agreed to client 'eve'"):
        federation.holder.open([Row("eve", rows[0].block, rows[0].body)], {**federation.sizes, "eve": 10})
    with pytest.raises(CiphertextError, match="names a client twice"):
        federation.holder.open([Row("client-0", ("client-1", "client-1"), rows[0].body)], federation.sizes)
    # A client's own ciphertext is not a product, not even when it is made to look like one.
    fresh = loaded("Ciphertext", federation.sealed["client-0"].partition(b"\n")[2], "fresh")
    scheme().evaluator.mod_switch_to_next_inplace(fresh)
    with pytest.raises(CiphertextError, match=r"made ready|oversize"):
        federation.holder.open([Row("client-0", ("client-0",), dumped(fresh))], federation.sizes)
    scheme().evaluator.mod_switch_to_inplace(fresh, scheme().context.last_parms_id())
    with pytest.raises(ClientRefusedError, match="impossible"):
        federation.holder.open([Row("client-0", ("client-0",), dumped(fresh))], federation.sizes)
    with pytest.raises(CiphertextError, match="oversize"):
        federation.holder.open([Row("client-0", rows[0].block, rows[0].body * 2)], federation.sizes)
    with pytest.raises(CiphertextError, match="cannot be read"):
        federation.holder.open([Row("client-0", rows[0].block, rows[0].body[:5000])], federation.sizes)
    with pytest.raises(CiphertextError, match="size of client 'client-0'"):
        federation.holder.open(rows, {**federation.sizes, "client-0": -3})
    swapped = [Row("client-0", rows[1].block, rows[1].body), Row("client-1", rows[0].block, rows[0].body), *rows[2:]]
    with pytest.raises(ClientRefusedError):
        federation.holder.open(swapped, federation.sizes)
    federation.holder.open(rows, federation.sizes)
    with pytest.raises(CiphertextError, match="opened before"):
        federation.holder.open([rows[0]], federation.sizes)
    other = Federation(federation.counts)
    with pytest.raises(CiphertextError, match="opened before"):  # nor something else under the same names
        federation.holder.open(other.server.rows(other.sealed)[:1], federation.sizes)


def test_what_was_opened_outlives_the_process(tmp_path: Any) -> None:
    federation = Federation([[9, 1, 0], [10, 0, 0], [3, 3, 4]])
    rows = federation.server.rows(federation.sealed)
    secret = keys(3)[0]
    holder = KeyHolder(secret, federation.names, tmp_path / "opened.sqlite")
    holder.open(rows, federation.sizes)
    holder.close()
    again = KeyHolder(secret, [*federation.names, "dora"], tmp_path / "opened.sqlite")
    assert np.array_equal(again.known(federation.names, federation.names), federation.counts @ federation.counts.T)
    assert np.isnan(again.known(["dora"], federation.names)).all()
    with pytest.raises(CiphertextError, match="opened before"):
        again.open(rows[:1], federation.sizes)


def test_numbers_that_are_no_gram_matrix_are_refused() -> None:
    """A server that opens something else in the place of a product is found out by the rank of the whole."""
    federation = Federation(np.random.default_rng(3).integers(20, 40, (8, 3)))
    first = {n: federation.sealed[n] for n in federation.names[:7]}
    federation.holder.open(federation.server.rows(first), federation.sizes)
    with_others, with_itself = federation.server.rows({"client-7": federation.sealed["client-7"]})
    changed = federation.public.seal("client-7", federation.counts[7] + np.array([2, 0, -2]))
    (counterfeit,) = SealedLabels(keys(3)[1]).rows({"client-7": changed})
    assert counterfeit.block == with_itself.block
    with pytest.raises(CiphertextError, match="not inner products"):
        federation.holder.open([with_others, counterfeit], federation.sizes)
    federation.holder.open([with_others, with_itself], federation.sizes)


def test_noise_is_drowned_and_leaves_room() -> None:
    """The noise a product leaves would tell the key holder about counts; what covers it is over 2^30 times larger."""
    largest = largest_count(10)
    federation = Federation(np.full((40, 10), largest))
    rows = federation.server.rows(federation.sealed)
    server, budget = federation.server, keys(10)[0].decryptor.invariant_noise_budget
    product = server.product("client-0", server.blocks[0])
    before, after = budget(product), budget(server.covered(product, 40))
    assert before - after >= 30
    assert after >= 10
    assert min(budget(loaded("Ciphertext", row.body, "row")) for row in rows) >= 5  # and it still decrypts


def test_a_server_that_lies_needs_no_accomplice() -> None:
    """It puts ciphertexts of its own in the place of as many clients as there are classes: every check holds."""
    federation = Federation([[9, 1, 0], [2, 2, 6], [0, 5, 5], [4, 4, 2], [3, 3, 4], [1, 0, 9]])
    puppets = federation.names[3:]
    made_up = np.array(sybil_counts(3, 10))
    for name, counts in zip(puppets, made_up, strict=True):
        federation.sealed[name] = federation.server.key.public.seal(name, counts)
    opened = federation.run()
    found = from_sybils(opened[3:, :3], made_up)
    assert np.array_equal(np.rint(found.counts), federation.counts[:3])


def test_secret_key_does_not_show_itself() -> None:
    secret, evaluation = keys(3)
    assert "body" not in repr(secret) and len(repr(secret)) < 60
    assert secret.body not in evaluation.to_bytes() and secret.body not in secret.public.to_bytes()
