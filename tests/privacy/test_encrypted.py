"""Sealed label counts against the products of the counts, and everything that must be refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cryptography.hazmat.primitives.hpke")

from fedcohort.core.errors import CiphertextError, InputError, KeyHolderError, UnknownNameError
from fedcohort.privacy.keyholder import KeyHolder
from fedcohort.privacy.scheme import (
    MAX_SIZE,
    STATEMENT_LIMIT,
    ClientKey,
    LabelSeal,
    PublicKey,
    SecretKey,
    _wrap,
    make_keys,
    parse_clients,
)


@pytest.mark.parametrize("classes", [2, 10, 62, 1024])
def test_products_are_exact(federation: Any, classes: int) -> None:
    counts = np.random.default_rng(classes).integers(0, MAX_SIZE // classes, (6, classes))
    counts[0], counts[1] = MAX_SIZE // classes, 0
    found = federation(counts, max_samples=MAX_SIZE)
    assert found.holder.admit(found.statements()) == {}
    assert np.array_equal(found.holder.products(found.names, found.names), counts @ counts.T)
    assert (counts @ counts.T).max() < 2**53
    assert max(map(len, found.statements().values())) < STATEMENT_LIMIT


@settings(max_examples=10, deadline=None)
@given(st.integers(2, 12), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_any_counts(classes: int, clients: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 5000, (clients, classes)) * (rng.random((clients, classes)) < 0.5)
    secret = make_keys(classes)
    keys = {f"c{i}": ClientKey.fresh() for i in range(clients)}
    holder = KeyHolder(secret, parse_clients(f"{n} {k.public}" for n, k in keys.items()))
    sent = {n: LabelSeal(secret.public, k).seal(n, row) for (n, k), row in zip(keys.items(), counts, strict=True)}
    assert holder.admit(sent) == {}
    assert np.array_equal(holder.products(list(keys), list(keys)), counts @ counts.T)


@pytest.mark.parametrize(
    "bad", [[-1, 3, 3], [0.5, 1, 1], [np.nan, 1, 1], [np.inf, 1, 1], [1, 2], [1e9, 0, 0], ["a", 1, 1], [8, 5, -3]]
)
def test_counts_that_cannot_be_sealed(federation: Any, bad: Any) -> None:
    with pytest.raises(InputError, match="counts"):
        federation([[1, 1, 1], [2, 2, 2]]).statement("client-0", bad)


def test_too_many_samples_name_the_option_that_allows_more(federation: Any) -> None:
    with pytest.raises(InputError, match=r"10 samples(.|\n)*--max-samples"):
        federation([[1, 1, 1], [2, 2, 2]], max_samples=10).statement("client-0", [9, 9, 9])


@pytest.mark.parametrize("bad", [[37.25, 1, 1], [-37, 1, 1], ["37 or so", 1, 1]])
def test_errors_do_not_show_counts(federation: Any, bad: Any) -> None:
    """A client's errors are sent to the server."""
    with pytest.raises(InputError) as error:
        federation([[1, 1, 1], [2, 2, 2]]).statement("client-0", bad)
    assert "37" not in str(error.value)


def numbers(*values: int) -> bytes:
    return bytes(32) + np.array([value % 2**64 for value in values], "<u8").tobytes()


@pytest.mark.parametrize(
    ("plain", "size", "why"),
    [
        (numbers(8, 5, -3), 10, "do not sum to the 10 samples"),
        (numbers(8, 5, 2**64 - 3), 10, "do not sum"),  # they would, if sums wrapped around
        (numbers(2**63, 2**63, 10), 10, "do not sum"),
        (numbers(3, 3, 5), 10, "do not sum"),
        (numbers(0, 0, 0), 10, "do not sum"),
        (numbers(3, 3, 4, 0), 10, "are not 3 numbers"),  # one value too many
        (numbers(5, 5), 10, "are not 3 numbers"),
        (b"", 10, "are not 3 numbers"),
        (numbers(1, 128, 16384), 16513, "0 to 10000 samples. Got 16513"),
        (numbers(3, 3, 4), -10, "0 to 10000 samples. Got -10"),
    ],
)
def test_a_client_that_lies_in_its_box_is_named_and_the_others_go_on(
    federation: Any, plain: bytes, size: int, why: str
) -> None:
    found = federation([[9, 1, 0], [10, 0, 0], [3, 3, 4], [0, 5, 5]], max_samples=10_000)
    sent = found.statements()
    sent["client-2"] = found.forged("client-2", plain, size)
    refused = found.holder.admit(sent)
    assert refused.keys() == {"client-2"} and why in refused["client-2"]
    rest = [name for name in found.names if name != "client-2"]
    kept = np.delete(found.counts, 2, axis=0)
    assert np.array_equal(found.holder.products(rest, rest), kept @ kept.T)
    with pytest.raises(UnknownNameError, match="'client-2'"):
        found.holder.products(["client-2"], rest)
    assert found.holder.admit(found.statements("client-2")) == {}  # it can take part once its statement is true


def test_statements_that_are_refused(federation: Any) -> None:
    found = federation([[3, 4, 0], [1, 0, 6], [2, 2, 2]])
    good = found.statement("client-0")
    other = federation(found.counts)
    four = federation([[1, 1, 1, 1]] * 2)
    head, _, body = good.partition(b"\n")
    for bad, why in (
        (good[:-100], "truncated"),
        (good[:20], "not a label statement"),
        (b"", "not a label statement"),
        (b"[" * 3000 + b"\n", "not a label statement"),
        (good[:-1] + bytes([good[-1] ^ 1]), "damaged"),
        (good + b"\0" * STATEMENT_LIMIT, f"at most {STATEMENT_LIMIT}"),
        (found.statement("client-1"), "made by client 'client-1'"),
        (other.statement("client-0"), f"for the key {other.public.name}; the federation's is {found.public.name}"),
        (four.statement("client-0"), "for the key"),
        (head.replace(b'"classes": 3', b'"classes": 4') + b"\n" + body, "4 classes"),
        (head.replace(b'"size": 7', b'"size": 8') + b"\n" + body, "not signed"),
        (head.replace(b'"size": 7', b'"size": true') + b"\n" + body, "samples. Got True"),
        (head.replace(b'"signature": "', b'"signature": "zz') + b"\n" + body, "not signed"),
        (head.replace(b'"signature": "', b'"signature": 7, "was": "') + b"\n" + body, "not signed"),
        (found.forged("client-0", b"", 7, box=b""), "cannot be opened"),
        (found.forged("client-0", b"", 7, box=body[:-1] + bytes([body[-1] ^ 1])), "cannot be opened"),
    ):
        assert why in found.holder.admit({"client-0": bad})["client-0"], why
    assert "not enrolled" in found.holder.admit({"eve": good})["eve"]
    # Another client's box in one's own statement, with a valid signature.
    theirs = found.statement("client-1").partition(b"\n")[2]
    assert (
        "cannot be opened" in found.holder.admit({"client-0": found.forged("client-0", b"", 7, box=theirs)})["client-0"]
    )
    assert found.holder.admit(found.statements()) == {}
    assert np.array_equal(found.holder.products(found.names, found.names), found.gram)


def test_the_first_statement_stands(federation: Any) -> None:
    """A client that seals again after a restart changes nothing, even with other counts."""
    found = federation([[3, 4, 0], [1, 0, 6]])
    assert found.holder.admit(found.statements()) == {}
    assert found.holder.admit(found.statements()) == {}
    assert found.holder.admit({"client-0": found.statement("client-0", [0, 0, 7])}) == {}
    assert np.array_equal(found.holder.products(found.names, found.names), found.gram)
    more = found.holder.admit({"client-0": found.statement("client-0", [3, 4, 1])})
    assert "stated 7 samples" in more["client-0"] and "now states 8" in more["client-0"]
    assert np.array_equal(found.holder.products(found.names, found.names), found.gram)


def test_statements_outlive_the_process(federation: Any, tmp_path: Path) -> None:
    found = federation([[9, 1, 0], [10, 0, 0], [3, 3, 4]], record=tmp_path / "statements.sqlite")
    found.holder.admit(found.statements("client-0", "client-1"))
    found.holder.close()
    stored = (tmp_path / "statements.sqlite").read_bytes()
    assert numbers(9, 1, 0)[32:] not in stored  # sealed, as they came
    again = KeyHolder(found.secret, parse_clients(found.lines), tmp_path / "statements.sqlite")
    assert np.array_equal(again.products(["client-1"], ["client-0"]), [[90]])
    again.admit(found.statements("client-2"))
    assert np.array_equal(again.products(["client-2"], found.names), found.gram[[2]])
    again.close()
    fewer = KeyHolder(found.secret, parse_clients(found.lines[1:]), tmp_path / "statements.sqlite")
    with pytest.raises(UnknownNameError, match="'client-0'"):  # a client that is no longer enrolled has no products
        fewer.products(["client-1"], ["client-0"])
    fewer.close()
    other = make_keys(3)
    with pytest.raises(KeyHolderError, match=f"{found.public.name}.*{other.public.name}"):
        KeyHolder(other, parse_clients(found.lines), tmp_path / "statements.sqlite")


def test_clients_check_what_was_opened(federation: Any) -> None:
    found = federation([[9, 1, 0], [10, 0, 0], [3, 3, 4]])
    found.holder.admit(found.statements("client-0", "client-1"))
    words = found.holder.confirm(["client-0", "client-1"])
    sets = {found.seal(n).confirm(n, found.counts[found.names.index(n)], word) for n, word in words.items()}
    assert len(sets) == 1  # all clients see the same set
    seal, counts = found.seal("client-0"), found.counts[0]
    with pytest.raises(CiphertextError, match=r"counts.*'client-0'"):
        seal.confirm("client-0", [8, 2, 0], words["client-0"])  # same size, other counts
    with pytest.raises(CiphertextError, match=r"10 samples of client 'client-0'.* 11"):
        seal.confirm("client-0", [9, 1, 1], words["client-0"])
    with pytest.raises(CiphertextError, match="of client 'client-1'"):
        seal.confirm("client-0", counts, words["client-1"])
    with pytest.raises(CiphertextError, match="signed"):
        seal.confirm("client-0", counts, words["client-0"].replace(b'"clients": 2', b'"clients": 3'))
    other = federation(found.counts)
    other.holder.admit(other.statements())
    with pytest.raises(CiphertextError, match=other.public.name):
        seal.confirm("client-0", counts, other.holder.confirm(["client-0"])["client-0"])
    with pytest.raises(CiphertextError, match="confirmation"):
        seal.confirm("client-0", counts, b"junk")
    found.holder.admit(found.statements("client-2"))
    assert seal.confirm("client-0", counts, found.holder.confirm(["client-0"])["client-0"]) not in sets


def test_confirmations_tell_nobody_else_anything(federation: Any) -> None:
    """Confirmations do not show that two clients have equal counts, nor that an outsider guessed counts right."""
    found = federation([[9, 1, 0], [9, 1, 0]])
    found.holder.admit(found.statements())
    words = found.holder.confirm(found.names)
    commitments = [word.partition(b'"commitment": "')[2][:64] for word in words.values()]
    assert len(set(commitments)) == 2


def test_clients_file() -> None:
    keys = [ClientKey.fresh() for _ in range(2)]
    lines = [f"anna {keys[0].public}", "", f"  St. Mary's North   {keys[1].public}  "]
    assert list(parse_clients(lines)) == ["anna", "St. Mary's North"]
    for bad in ("anna", "anna abc", keys[0].public, f"anna {keys[0].public[:-4]}"):
        with pytest.raises(InputError, match="client-key"):
            parse_clients([bad])
    with pytest.raises(InputError, match="twice"):
        parse_clients([lines[0], f"anna {keys[1].public}"])
    with pytest.raises(InputError, match="twice"):  # one client under two names
        parse_clients([lines[0], f"ben {keys[0].public}"])


def test_keys_as_files() -> None:
    secret = make_keys(3, 500)
    assert SecretKey.from_bytes(secret.to_bytes()).public == secret.public
    assert PublicKey.from_bytes(secret.public.to_bytes()) == secret.public
    assert secret.body not in secret.public.to_bytes() and len(repr(secret)) < 60
    key = ClientKey.fresh()
    assert ClientKey.from_bytes(key.to_bytes()) == key and key.body.hex() not in repr(key)
    assert str(key.body) not in repr(key)
    assert make_keys(3, 500).public.name != secret.public.name
    with pytest.raises(CiphertextError, match="version"):
        PublicKey.from_bytes(_wrap("public key", {"classes": 3}, b"of an earlier version"))
    for classes, most in ((1, 10), (2000, 10), (3, 0), (3, MAX_SIZE + 1)):
        with pytest.raises(InputError):
            make_keys(classes, most)


def test_a_record_that_cannot_be_used_changes_nothing(federation: Any, tmp_path: Path) -> None:
    """Two processes use one folder, or the file is damaged."""
    record = tmp_path / "statements.sqlite"
    found = federation([[9, 1, 0], [10, 0, 0]], record=record)
    second = KeyHolder(found.secret, parse_clients(found.lines), record)
    assert found.holder.admit(found.statements("client-0")) == {}
    other = {"client-0": found.statement("client-0", [0, 0, 10]), "client-1": found.statement("client-1")}
    with pytest.raises(
        KeyHolderError, match="another process"
    ):  # a client's first statement is final, in all processes
        second.admit(other)
    with pytest.raises(UnknownNameError):
        second.products(["client-1"], ["client-1"])
    second.close()
    found.holder.close()
    again = KeyHolder(found.secret, parse_clients(found.lines), record)
    assert again.products(["client-0"], ["client-0"]).tolist() == [[82]]
    again.close()
    record.write_bytes(b"not a database, but long enough to be read as one" * 100)
    with pytest.raises(KeyHolderError, match="not a database"):
        KeyHolder(found.secret, parse_clients(found.lines), record)
