"""What a host does with sealed labels: tables that start, grow, refuse one client and go on with the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tenseal")

from fedcohort import ClientTable, LabelCounts, LabelGram, RoundReport, RoundRequest, Session, create
from fedcohort.clients import LabelGramRows
from fedcohort.errors import CiphertextError, InputError
from fedcohort.privacy.keyholder import ClientRefusedError, KeyHolder
from fedcohort.privacy.openers import EncryptedLabels, NoisyLabels, RotatedLabels, noisy_labels
from fedcohort.privacy.rotation import SecretRotation
from fedcohort.privacy.scheme import make_keys

CLASSES = 4
SECRET, EVALUATION = make_keys(CLASSES)
COUNTS = np.random.default_rng(8).integers(0, 60, (9, CLASSES))
NAMES = [f"c{i}" for i in range(9)]
SIZES = {n: int(c.sum()) for n, c in zip(NAMES, COUNTS, strict=True)}


def sealed(*clients: int) -> dict[str, bytes]:
    return {NAMES[i]: SECRET.public.seal(NAMES[i], COUNTS[i]) for i in clients}


def test_grows_by_rows_and_chooses_as_with_counts() -> None:
    opener = EncryptedLabels(EVALUATION, KeyHolder(SECRET, NAMES))
    steps = [(range(5), ()), ((5,), NAMES[:5]), ((6, 7, 8), NAMES[:6])]
    sessions: list[Session] = []
    for private in (True, False):
        for new, before in steps:
            names = [NAMES[i] for i in new]
            labels = opener.open(sealed(*new), SIZES, before) if private else LabelCounts(COUNTS[list(new)])
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
    with pytest.raises(InputError, match="clients that join"):
        Session(create("fedcbs"), joining).ask(RoundRequest(size=1))
    base = ClientTable(sizes=[1, 2, 3], labels=LabelGram(np.eye(3), 2))
    with pytest.raises(InputError, match=r"must have 4 columns\. Got 3"):
        base.extended(joining)
    with pytest.raises(InputError, match="grows by the rows"):
        base.extended(ClientTable(sizes=[1], labels=LabelGram([[1.0]], 2)))
    with pytest.raises(InputError, match="as many columns"):
        LabelGramRows([[1.0], [2.0]], 2)
    with pytest.raises(InputError, match="finite"):
        LabelGramRows([[np.nan]], 2)


def test_one_liar_is_named_and_the_rest_go_on() -> None:
    opener = EncryptedLabels(EVALUATION, KeyHolder(SECRET, NAMES))
    lie = {**sealed(0, 1, 2, 3), NAMES[2]: SECRET.public.seal(NAMES[2], [200, 0, 0, 0])}
    with pytest.raises(ClientRefusedError) as caught:
        opener.open(lie, SIZES, ())
    assert caught.value.client == NAMES[2]
    labels = opener.open({n: s for n, s in lie.items() if n != NAMES[2]}, SIZES, ())
    kept = COUNTS[[0, 1, 3]]
    assert isinstance(labels, LabelGram) and np.array_equal(labels.gram, kept @ kept.T)


def test_one_with_another_key_is_named() -> None:
    other = make_keys(CLASSES)[0].public.seal(NAMES[1], COUNTS[1])
    with pytest.raises(CiphertextError, match="sealed with the key"):
        EncryptedLabels(EVALUATION, KeyHolder(SECRET, NAMES)).check(NAMES[1], other)
    header, _, body = other.partition(b"\n")
    own = sealed(1)[NAMES[1]].partition(b"\n")[0]
    forged = {**json.loads(header), "key": json.loads(own)["key"]}
    opener = EncryptedLabels(EVALUATION, KeyHolder(SECRET, NAMES))
    with pytest.raises(ClientRefusedError, match="'c1' are of another key"):
        opener.open({**sealed(0, 2), NAMES[1]: json.dumps(forged).encode() + b"\n" + body}, SIZES, ())


def test_a_restarted_server(tmp_path: Path) -> None:
    holder = KeyHolder(SECRET, NAMES)
    first = EncryptedLabels(EVALUATION, holder, store=tmp_path / "sealed")
    before = first.open(sealed(0, 1, 2), SIZES, ())
    (tmp_path / "evaluation.key").write_bytes(EVALUATION.to_bytes())
    again = EncryptedLabels(tmp_path / "evaluation.key", holder, store=tmp_path / "sealed")
    # Nothing is opened twice: what is on record is returned, whatever is sent.
    same = again.open(sealed(0, 1, 2), SIZES, ())
    assert isinstance(before, LabelGram) and isinstance(same, LabelGram) and np.array_equal(before.gram, same.gram)
    rows = again.open(sealed(3), SIZES, NAMES[:3])
    assert isinstance(rows, LabelGramRows)
    assert np.array_equal(rows.rows, COUNTS[[3]] @ COUNTS[:4].T)
    forgetful = EncryptedLabels(EVALUATION, holder)
    with pytest.raises(InputError, match="not here"):
        forgetful.open(sealed(4), SIZES, NAMES[:4])


class Broken:
    """A key holder whose machine is gone until it is mended."""

    def __init__(self, holder: KeyHolder) -> None:
        self.known, self.readable, self.holder = holder.known, holder.readable, holder
        self.gone = True

    def open(self, rows: Any, sizes: Any) -> Any:
        if self.gone:
            raise ConnectionError("gone")
        return self.holder.open(rows, sizes)


def test_a_key_holder_that_is_gone_changes_nothing() -> None:
    holder = Broken(KeyHolder(SECRET, NAMES))
    opener = EncryptedLabels(EVALUATION, holder)
    with pytest.raises(ConnectionError):
        opener.open(sealed(0, 1), SIZES, ())
    holder.gone = False
    labels = opener.open(sealed(0, 1), SIZES, ())
    assert isinstance(labels, LabelGram) and np.array_equal(labels.gram, COUNTS[:2] @ COUNTS[:2].T)


def test_rotated_and_noisy() -> None:
    rotation = SecretRotation.fresh(CLASSES)
    opener = RotatedLabels(CLASSES)
    sent = {n: rotation.seal(n, c) for n, c in zip(NAMES, COUNTS, strict=True)}
    opener.check("c0", sent["c0"])
    factor = opener.open(sent, SIZES, ()).factor
    assert np.allclose(factor @ factor.T, COUNTS @ COUNTS.T)
    with pytest.raises(ClientRefusedError) as caught:
        opener.open(sent, {**SIZES, "c4": 7}, ())
    assert caught.value.client == "c4"
    noisy = NoisyLabels(CLASSES)
    assert noisy.open({"a": noisy_labels("a", [1.5, 0, 2, 3])}, {}, ()).counts.tolist() == [[1.5, 0.0, 2.0, 3.0]]
    for bad, match in (([1, 2], "2 classes"), ([1, -2, 0, 0], "not negative"), ([np.nan, 0, 0, 0], "finite")):
        with pytest.raises(CiphertextError, match=match):
            noisy.check("a", noisy_labels("a", bad))
    with pytest.raises(CiphertextError, match="for client 'b'"):
        noisy.check("a", noisy_labels("b", [1, 2, 3, 4]))
