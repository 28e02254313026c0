"""What a host does with sealed labels: tables that start, grow, refuse one client and continue with the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cryptography.hazmat.primitives.hpke")

from fedcohort import ClientTable, LabelCounts, Session, create
from fedcohort.core.clients import LabelGram, LabelGramRows
from fedcohort.core.errors import CiphertextError, InputError, KeyHolderError
from fedcohort.core.protocol import RoundReport, RoundRequest
from fedcohort.privacy.label_decoders import (
    ClientRefusedError,
    EncryptedLabels,
    NoisyLabels,
    RotatedLabels,
    pack_noisy_counts,
)
from fedcohort.privacy.rotation import SecretRotation

CLASSES = 4
COUNTS = np.random.default_rng(8).integers(0, 60, (9, CLASSES))
NAMES = [f"c{i}" for i in range(9)]
SIZES = {n: int(c.sum()) for n, c in zip(NAMES, COUNTS, strict=True)}


@pytest.fixture
def nine(federation: Any) -> Any:
    return federation(COUNTS, NAMES)


def test_grows_by_rows_and_chooses_as_with_counts(nine: Any) -> None:
    opener = EncryptedLabels(nine.public, nine.holder)
    steps = [(range(5), ()), ((5,), NAMES[:5]), ((6, 7, 8), NAMES[:6])]
    sessions: list[Session] = []
    for private in (True, False):
        for new, before in steps:
            names = [NAMES[i] for i in new]
            labels = opener.open(nine.statements(*names), SIZES, before) if private else LabelCounts(COUNTS[list(new)])
            clients = ClientTable(names=names, sizes=[SIZES[n] for n in names], labels=labels)
            if before:
                sessions[-1].join(clients)
            else:
                sessions.append(Session(create("fedcbs"), clients, seed=4))
            for _ in range(6):
                cohort = sessions[-1].ask(RoundRequest(size=3))
                sessions[-1].tell(RoundReport(cohort.ticket, cohort.clients))
    ours, plain = ([row.clients.tolist() for row in s.journal.cohorts()] for s in sessions)
    assert ours == plain and len(ours) == 18
    gram = sessions[0].table.labels
    assert isinstance(gram, LabelGram) and np.array_equal(gram.gram, COUNTS @ COUNTS.T)


def test_rows_alone_choose_nothing() -> None:
    joining = ClientTable(sizes=[3], labels=LabelGramRows([[1.0, 2.0, 9.0]], 2))
    with pytest.raises(InputError):
        Session(create("fedcbs"), joining).ask(RoundRequest(size=1))
    base = ClientTable(sizes=[1, 2, 3], labels=LabelGram(np.eye(3), 2))
    with pytest.raises(InputError, match=r"4 .*Got 3"):
        base.with_clients(joining)
    with pytest.raises(InputError):
        base.with_clients(ClientTable(sizes=[1], labels=LabelGram([[1.0]], 2)))
    with pytest.raises(InputError, match="2 columns"):
        LabelGramRows([[1.0], [2.0]], 2)
    with pytest.raises(InputError):
        LabelGramRows([[np.nan]], 2)


def test_who_cannot_be_used_is_named_at_once_and_the_rest_go_on(nine: Any) -> None:
    opener = EncryptedLabels(nine.public, nine.holder)
    sent = nine.statements(*NAMES[:5])
    sent["c2"] = nine.forged("c2", bytes(32 + 8 * CLASSES), SIZES["c2"])
    sent["c3"] = sent["c3"][:-1]
    sent["eve"] = sent["c4"]
    with pytest.raises(ClientRefusedError, match="3 others") as caught:
        opener.open(sent, {**SIZES, "c4": 7}, ())
    refused = caught.value.refused
    assert refused.keys() == {"c2", "c3", "c4", "eve"}
    assert "do not sum" in refused["c2"] and "truncated" in refused["c3"] and "made by client 'c4'" in refused["eve"]
    assert "7 samples" in refused["c4"]
    labels = opener.open({n: sent[n] for n in ("c0", "c1")}, SIZES, ())
    assert isinstance(labels, LabelGram) and np.array_equal(labels.gram, COUNTS[:2] @ COUNTS[:2].T)


def test_another_key_is_one_error_with_both_names(nine: Any, federation: Any) -> None:
    """New keys at the key holder, or an old public.key at the server: one error, and no client is blamed."""
    renewed = federation(COUNTS, NAMES)
    for public, sent in ((nine.public, nine.statements()), (nine.public, renewed.statements())):
        with pytest.raises(KeyHolderError) as caught:
            EncryptedLabels(public, renewed.holder).open(sent, SIZES, ())
        assert nine.public.name in caught.value.message and renewed.public.name in caught.value.message
    with pytest.raises(CiphertextError, match=f"{renewed.public.name}.*{nine.public.name}"):
        EncryptedLabels(nine.public, nine.holder).check("c1", renewed.statement("c1"))


def test_a_restarted_server(nine: Any, tmp_path: Path) -> None:
    """The key holder stores the statements; the server stores nothing that could be lost."""
    before = EncryptedLabels(nine.public, nine.holder).open(nine.statements(*NAMES[:3]), SIZES, ())
    (tmp_path / "public.key").write_bytes(nine.public.to_bytes())
    again = EncryptedLabels(tmp_path / "public.key", nine.holder)
    same = again.open(nine.statements(*NAMES[:3]), SIZES, ())
    assert isinstance(before, LabelGram) and isinstance(same, LabelGram) and np.array_equal(before.gram, same.gram)
    rows = again.open(nine.statements("c3"), SIZES, NAMES[:3])
    assert isinstance(rows, LabelGramRows)
    assert np.array_equal(rows.rows, COUNTS[[3]] @ COUNTS[:4].T)


def test_a_key_holder_that_forgot_the_federation_blames_nobody(nine: Any) -> None:
    with pytest.raises(KeyHolderError, match=r"'c0'"):
        EncryptedLabels(nine.public, nine.holder).open(nine.statements("c4"), SIZES, NAMES[:4])


def test_rounds_do_not_wait_for_a_key_holder_that_is_gone(nine: Any) -> None:
    asked = []

    class Gone:
        public = nine.public

        def confirm(self, clients: Any) -> Any:
            asked.append(clients)
            raise KeyHolderError("gone")

    opener = EncryptedLabels(nine.public, Gone())
    assert [opener.confirmations(NAMES[:3]) for _ in range(20)] == [{}] * 20
    assert len(asked) == 1


class Broken:
    """A key holder that cannot be reached until it is repaired."""

    def __init__(self, holder: Any) -> None:
        self.public, self.confirm, self.products, self.holder = holder.public, holder.confirm, holder.products, holder
        self.gone = True

    def admit(self, statements: Any) -> Any:
        if self.gone:
            raise KeyHolderError("gone")
        return self.holder.admit(statements)


def test_a_key_holder_that_is_gone_changes_nothing(nine: Any) -> None:
    holder = Broken(nine.holder)
    opener = EncryptedLabels(nine.public, holder)
    with pytest.raises(KeyHolderError):
        opener.open(nine.statements("c0", "c1"), SIZES, ())
    assert opener.confirmations(["c0"]) == {}
    holder.gone = False
    labels = opener.open(nine.statements("c0", "c1"), SIZES, ())
    assert isinstance(labels, LabelGram) and np.array_equal(labels.gram, COUNTS[:2] @ COUNTS[:2].T)
    nine.seal("c0").confirm("c0", COUNTS[0], opener.confirmations(["c0", "c1"])["c0"])


def test_rotated_and_noisy() -> None:
    rotation = SecretRotation.fresh(CLASSES)
    opener = RotatedLabels(CLASSES)
    sent = {n: rotation.seal(n, c) for n, c in zip(NAMES, COUNTS, strict=True)}
    opener.check("c0", sent["c0"])
    factor = opener.open(sent, SIZES, ()).factor
    assert np.allclose(factor @ factor.T, COUNTS @ COUNTS.T)
    with pytest.raises(ClientRefusedError) as caught:
        opener.open(sent, {**SIZES, "c4": 7}, ())
    assert caught.value.refused.keys() == {"c4"}
    assert opener.confirmations(["c0"]) == {}
    noisy = NoisyLabels(CLASSES)
    assert noisy.open({"a": pack_noisy_counts("a", [1.5, 0, 2, 3])}, {}, ()).counts.tolist() == [[1.5, 0.0, 2.0, 3.0]]
    for bad, match in (([1, 2], "2 classes"), ([1, -2, 0, 0], "not negative"), ([np.nan, 0, 0, 0], "finite"),
                       ([1e300, 1e300, 0, 0], "at most 9.0072e.15")):  # fmt: skip
        with pytest.raises(CiphertextError, match=match):
            noisy.check("a", pack_noisy_counts("a", bad))
    with pytest.raises(CiphertextError, match="for client 'b'"):
        noisy.check("a", pack_noisy_counts("b", [1, 2, 3, 4]))
