"""Private class balance on Flower: ciphertexts in messages, keys elsewhere, the same cohorts as with plain counts."""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cryptography.hazmat.primitives.hpke")

from flwr.app import ArrayRecord, Context
from flwr.client.mod import secaggplus_mod
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from flwr.supercore.privacy_accounting import NeighboringRelation, PrivacyConfig, SamplingMethod

from fedcohort import ClientTable, LabelCounts, Session, create
from fedcohort.audit.choices import audit_journal
from fedcohort.core.clients import LabelGram
from fedcohort.core.errors import CiphertextError, KeyHolderError, ParameterError
from fedcohort.core.protocol import RoundReport, RoundRequest
from fedcohort.core.signals import Signal
from fedcohort.hosts.flower import Answers, Facts, FederationTimeoutError, RoundError, cohort_client, torch_answers
from fedcohort.hosts.flower.private import Private
from fedcohort.hosts.wire import RECORD
from fedcohort.journal import read_journal
from fedcohort.privacy import primitives
from fedcohort.privacy.keyholder import KeyHolder
from fedcohort.privacy.label_decoders import EncryptedLabels, NoisyLabels, RotatedLabels, pack_noisy_counts
from fedcohort.privacy.ledger import Ledger
from fedcohort.privacy.noise import GeometricNoise, LossNoise
from fedcohort.privacy.rotation import SecretRotation
from fedcohort.privacy.scheme import ClientKey, LabelSeal, PublicKey, SecretKey, _wrap, make_keys, parse_clients

COUNTS = np.array([[9, 1, 0], [0, 8, 2], [1, 1, 8], [5, 5, 0], [0, 4, 6], [3, 3, 4], [10, 0, 0], [0, 0, 10]])
NAMES = [f"client-{i}" for i in range(8)]
SECRET = make_keys(3)
KEYS = {name: ClientKey.fresh() for name in NAMES}


def keyholder(names: Any = NAMES, secret: SecretKey = SECRET, cls: type[KeyHolder] = KeyHolder, **kwargs: Any) -> Any:
    return cls(secret, parse_clients(f"{name} {KEYS[name].public}" for name in names), **kwargs)


def sealed(name: str, counts: Any, secret: SecretKey = SECRET) -> bytes:
    """As an honest client seals."""
    return LabelSeal(secret.public, KEYS[name]).seal(name, counts)


def forged(name: str, counts: Any, size: int) -> bytes:
    """As a client seals that does not use our code: any numbers, truly signed."""
    about = json.dumps(["fedcohort label statement", 1, SECRET.public.name, 3, name, size]).encode()
    plain = bytes(32) + np.array([int(c) % 2**64 for c in counts], "<u8").tobytes()
    box = primitives.seal(SECRET.public.body, about, plain)
    signature = primitives.sign(KEYS[name].body, about + hashlib.sha256(box).digest()).hex()
    fields = {"key": SECRET.public.name, "classes": 3, "client": name, "size": size, "signature": signature}
    return _wrap("label statement", fields, box)


def answers(seal: Any, confirm: Any = None) -> Answers:
    def facts(context: Context) -> Facts:
        number = int(context.node_config["partition-id"])
        name = str(context.node_config["client-name"])
        return Facts(size=int(COUNTS[number].sum()), sealed_labels=seal(name, COUNTS[number]))

    return Answers(facts=facts, confirm=confirm)


def plain_cohorts(rounds: int, size: int, clients: int = 8, seed: int = 3) -> list[list[int]]:
    """What Fed-CBS chooses when it is simply told the counts."""
    table = ClientTable(names=NAMES[:clients], labels=LabelCounts(COUNTS[:clients]))
    session = Session(create("fedcbs"), table, seed=seed)
    found = []
    for _ in range(rounds):
        cohort = session.ask(RoundRequest(size=size))
        session.tell(RoundReport(cohort.ticket, cohort.clients))
        found.append(cohort.clients.tolist())
    return found


def cohorts(journal: Path) -> list[list[int]]:
    record = read_journal(journal)
    try:
        return [row.clients.tolist() for row in record.cohorts()]
    finally:
        record.close()


def add(fleet: Any, kit: Any, number: int, seal: Any) -> None:
    fleet.grid.add(fleet.node(number, cohort_client(kit.client_app(), answers(seal))))


def started(fleet: Any, kit: Any, journal: Path, labels: Any, rounds: int = 5, **kwargs: Any) -> None:
    strategy = fleet.strategy(
        "fedcbs", journal=journal, seed=3, cohort_size=3, labels=labels, wait_for=kwargs.pop("wait_for", 6), **kwargs
    )
    strategy.start(fleet.grid, kit.model(), num_rounds=rounds)


def test_ciphertexts_give_the_cohorts_of_plain_counts(empty_fleet: Any, kit: Any, tmp_path: Path) -> None:
    for number in range(6):
        add(empty_fleet, kit, number, sealed)
    holder = keyholder()
    started(empty_fleet, kit, tmp_path / "run", EncryptedLabels(SECRET.public, holder))
    assert cohorts(tmp_path / "run") == plain_cohorts(5, 3, 6)
    table, _ = read_journal(tmp_path / "run").table()
    assert isinstance(table.labels, LabelGram)
    assert np.array_equal(table.labels.gram, COUNTS[:6] @ COUNTS[:6].T)
    assert Signal.LABEL_COUNTS not in table.signals


def test_a_client_that_joins_later_costs_its_own_row(empty_fleet: Any, kit: Any, tmp_path: Path) -> None:
    for number in range(6):
        add(empty_fleet, kit, number, sealed)
    asked: list[set[str]] = []

    class Watched(KeyHolder):
        def admit(self, statements: Any) -> Any:
            asked.append(set(statements))
            return super().admit(statements)

    empty_fleet.clock.at.append((4.0, lambda: add(empty_fleet, kit, 6, sealed)))
    started(empty_fleet, kit, tmp_path / "run", EncryptedLabels(SECRET.public, keyholder(cls=Watched)), rounds=12)
    assert asked == [set(NAMES[:6]), {"client-6"}]
    table, _ = read_journal(tmp_path / "run").table()
    assert isinstance(table.labels, LabelGram) and np.array_equal(table.labels.gram, COUNTS[:7] @ COUNTS[:7].T)


def test_who_sends_rubbish_takes_no_part_and_disturbs_nobody(
    empty_fleet: Any, kit: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = make_keys(3)
    bad = {
        1: lambda name, counts: sealed(name, counts)[:-50],
        2: lambda name, counts: sealed(name, counts, other),
        3: lambda name, counts: forged(name, [200, 0, 0], 10),  # found out by the key holder
    }
    for number in range(8):
        add(empty_fleet, kit, number, bad.get(number, sealed))
    with caplog.at_level(logging.WARNING):
        started(empty_fleet, kit, tmp_path / "run", EncryptedLabels(SECRET.public, keyholder()), wait_for=5)
    table, _ = read_journal(tmp_path / "run").table()
    good = [0, 4, 5, 6, 7]
    assert table.names == tuple(NAMES[i] for i in good)
    assert isinstance(table.labels, LabelGram) and np.array_equal(table.labels.gram, COUNTS[good] @ COUNTS[good].T)
    for name, why in (("client-1", "truncated"), ("client-2", "for the key"), ("client-3", "do not sum")):
        assert any(name in m and why in m for m in caplog.messages), (name, why)


def test_a_restarted_server_knows_s_and_takes_newcomers(empty_fleet: Any, kit: Any, tmp_path: Path) -> None:
    for number in range(6):
        add(empty_fleet, kit, number, sealed)
    holder = keyholder()
    for rounds in (2, 4):
        labels = EncryptedLabels(SECRET.public, holder)
        started(empty_fleet, kit, tmp_path / "run", labels, rounds=rounds)
    assert cohorts(tmp_path / "run") == plain_cohorts(4, 3, 6)
    add(empty_fleet, kit, 7, sealed)
    labels = EncryptedLabels(SECRET.public, holder)
    started(empty_fleet, kit, tmp_path / "run", labels, rounds=8)
    table, _ = read_journal(tmp_path / "run").table()
    members = [*range(6), 7]
    assert isinstance(table.labels, LabelGram)
    assert np.array_equal(table.labels.gram, COUNTS[members] @ COUNTS[members].T)


# -- clients that lie, in whatever order they come -------------------------------------------------------------------


def members(journal: Path) -> list[str]:
    record = read_journal(journal)
    try:
        table, _ = record.table()
        assert isinstance(table.labels, LabelGram)
        numbers = [NAMES.index(name) for name in table.names]
        assert np.array_equal(table.labels.gram, COUNTS[numbers] @ COUNTS[numbers].T)
        return list(table.names)
    finally:
        record.close()


@pytest.mark.parametrize(
    "lie", [[8, 5, -3], [3, 3, 4, 0], [3, 3, 4, 12345], [10], []], ids=["negative", "unused", "hidden", "few", "none"]
)
def test_a_liar_is_named_before_anything_is_opened_and_newcomers_join(
    lie: list[int], empty_fleet: Any, kit: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Counts 8, 5, -3 of 10 samples passed every check while nobody else had class 3; then nobody could join."""
    for number in range(6):
        add(empty_fleet, kit, number, (lambda name, counts: forged(name, lie, 10)) if number == 3 else sealed)
    empty_fleet.clock.at.append((4.0, lambda: [add(empty_fleet, kit, n, sealed) for n in (6, 7)]))
    with caplog.at_level(logging.WARNING):
        started(empty_fleet, kit, tmp_path / "run", EncryptedLabels(SECRET.public, keyholder()), 12, wait_for=5)
    assert members(tmp_path / "run") == [f"client-{i}" for i in (0, 1, 2, 4, 5, 6, 7)]
    said = [m for m in caplog.messages if "is left out" in m]
    assert len(said) == 1 and "'client-3'" in said[0], said


@pytest.mark.parametrize("junk", [lambda name, counts: b"junk", lambda name, counts: forged(name, [9, 9, 9], 10)])
def test_waiting_for_everybody_with_one_that_sends_junk(junk: Any, empty_fleet: Any, kit: Any, tmp_path: Path) -> None:
    for number in range(6):
        add(empty_fleet, kit, number, junk if number == 3 else sealed)
    labels = EncryptedLabels(SECRET.public, keyholder())
    with pytest.raises(FederationTimeoutError, match=r"30 s for 6 clients.* 5 .*: client-3\."):
        started(empty_fleet, kit, tmp_path / "run", labels, patience=30.0)


@pytest.mark.parametrize("junk", [lambda name, counts: b"junk", lambda name, counts: forged(name, [9, 9, 9], 10), None])
def test_unfit_nodes_that_come_first_do_not_end_the_run(junk: Any, empty_fleet: Any, kit: Any, tmp_path: Path) -> None:
    for number in (0, 1):
        if junk is None:  # it says nothing about its labels at all
            empty_fleet.grid.add(empty_fleet.node(number, cohort_client(kit.client_app(), Answers())))
        else:
            add(empty_fleet, kit, number, junk)
    empty_fleet.clock.at.append((20.0, lambda: [add(empty_fleet, kit, n, sealed) for n in (2, 3, 4)]))
    labels = EncryptedLabels(SECRET.public, keyholder())
    started(empty_fleet, kit, tmp_path / "run", labels, wait_for=2, patience=60.0)
    assert members(tmp_path / "run") == ["client-2", "client-3", "client-4"]


def test_a_client_that_mends_its_labels_takes_part(empty_fleet: Any, kit: Any, tmp_path: Path) -> None:
    ill = [True]

    def seal(name: str, counts: Any) -> bytes:
        return forged(name, [9, 9, 9], 10) if ill[0] else sealed(name, counts)

    for number in range(4):
        add(empty_fleet, kit, number, seal if number == 3 else sealed)
    empty_fleet.clock.at.append((10.0, ill.clear))
    empty_fleet.clock.at.append((10.0, lambda: ill.append(False)))
    labels = EncryptedLabels(SECRET.public, keyholder())
    started(empty_fleet, kit, tmp_path / "run", labels, 20, wait_for=3, describe_every=5.0)
    assert members(tmp_path / "run") == NAMES[:4]


def test_new_keys_are_one_error_that_names_both(
    empty_fleet: Any, kit: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    renewed = make_keys(3)
    for number in range(6):
        add(empty_fleet, kit, number, sealed)
    # At the key holder: the server still has the old public key, as the clients do.
    with pytest.raises(KeyHolderError, match=f"{renewed.public.name}.*{SECRET.public.name}"):
        started(empty_fleet, kit, tmp_path / "a", EncryptedLabels(SECRET.public, keyholder(secret=renewed)))
    # At key holder and server: all clients have the old one, and it is said once.
    labels = EncryptedLabels(renewed.public, keyholder(secret=renewed))
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(FederationTimeoutError, match=f"{SECRET.public.name}; the federation's is {renewed.public.name}"),
    ):
        started(empty_fleet, kit, tmp_path / "b", labels, patience=20.0)
    assert len([m for m in caplog.messages if "is left out" in m]) == 1, caplog.messages


class PowerCut(BaseException):
    """Ends the process, as far as anybody can tell."""


def test_killed_between_statements_and_products_everybody_can_still_join(
    empty_fleet: Any, kit: Any, tmp_path: Path
) -> None:
    """At the start, and when newcomers join; server and key holder both begin anew."""

    class Cut(KeyHolder):
        cut = True

        def products(self, rows: Any, columns: Any) -> Any:
            if self.cut:
                raise PowerCut
            return super().products(rows, columns)

    def run(cut: bool, rounds: int) -> None:
        holder = keyholder(cls=Cut, record=tmp_path / "statements.sqlite")
        holder.cut = cut
        try:
            started(empty_fleet, kit, tmp_path / "run", EncryptedLabels(SECRET.public, holder), rounds)
        finally:
            holder.close()

    for number in range(6):
        add(empty_fleet, kit, number, sealed)
    with pytest.raises(PowerCut):
        run(True, 3)
    run(False, 3)
    assert cohorts(tmp_path / "run") == plain_cohorts(3, 3, 6)
    for number in (6, 7):
        add(empty_fleet, kit, number, sealed)
    with pytest.raises(PowerCut):
        run(True, 6)
    run(False, 6)
    assert members(tmp_path / "run") == NAMES


def test_clients_check_what_was_opened_in_their_name(
    empty_fleet: Any, kit: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With every train message; client-2 finds other counts than it has, and does not train."""
    seen: dict[str, set[str]] = {}

    def confirm(context: Context, word: bytes) -> str:
        name = str(context.node_config["client-name"])
        counts = [8, 1, 1] if name == "client-2" else COUNTS[NAMES.index(name)]
        digest = LabelSeal(SECRET.public, KEYS[name]).confirm(name, counts, word)
        seen.setdefault(name, set()).add(digest)
        return digest

    for number in range(4):
        app = cohort_client(kit.client_app(), answers(sealed, confirm))
        empty_fleet.grid.add(empty_fleet.node(number, app))
    labels = EncryptedLabels(SECRET.public, keyholder())
    with caplog.at_level(logging.INFO):
        started(empty_fleet, kit, tmp_path / "run", labels, 6, wait_for=4)
    assert seen.keys() == {"client-0", "client-1", "client-3"}
    assert len(set.union(*seen.values())) == 1
    assert any(
        "this client does not train" in m and "other counts than client 'client-2'" in m for m in caplog.messages
    )
    assert any("in the set of clients" in m for m in caplog.messages)
    trained = {name for r in range(1, 7) for name in empty_fleet.names(r)}
    assert trained == set(NAMES[:4])  # it was asked, as the others were


def test_a_name_in_either_form_of_unicode(empty_fleet: Any, kit: Any, tmp_path: Path) -> None:
    """The host composes names; what a client seals, and what it is enrolled under, is composed as well."""
    forms = ["Zu\u0308rich", "Ge\u0301nova"]
    keys = {name: ClientKey.fresh() for name in forms}
    holder = KeyHolder(SECRET, parse_clients(f"{name} {key.public}" for name, key in keys.items()))

    for number, name in enumerate(forms):

        def facts(context: Context, name: str = name) -> Facts:
            return Facts(size=10, sealed_labels=LabelSeal(SECRET.public, keys[name]).seal(name, [5, 5, 0]))

        app = cohort_client(kit.client_app(), Answers(facts=facts, name=lambda context, name=name: name))
        empty_fleet.grid.add(empty_fleet.node(number, app))
    started(empty_fleet, kit, tmp_path / "run", EncryptedLabels(SECRET.public, holder), 2, wait_for=2)
    with closing(read_journal(tmp_path / "run")) as record:
        assert set(record.table()[0].names) == {"Z\u00fcrich", "G\u00e9nova"}


def test_torch_answers_seal_and_check(tmp_path: Path) -> None:
    import torch

    labels = np.repeat(np.arange(3), COUNTS[0])
    seal = LabelSeal(SECRET.public, KEYS["client-0"])
    mine = torch_answers(
        lambda c: torch.nn.Linear(2, 3), lambda c: (torch.ones(len(labels), 2), labels), classes=3, seal=seal
    )
    context = Context(
        run_id=1, node_id=1, node_config={"client-name": "client-0"}, state=None, run_config={}, series_id=1
    )
    assert mine.facts is not None and mine.confirm is not None
    holder = keyholder()
    assert holder.admit({"client-0": mine.facts(context).sealed_labels}) == {}
    assert len(mine.confirm(context, holder.confirm(["client-0"])["client-0"])) == 64
    labels[0] = 2
    with pytest.raises(CiphertextError, match="other counts"):
        mine.confirm(context, holder.confirm(["client-0"])["client-0"])
    with pytest.raises(ParameterError, match="must be a LabelSeal"):
        torch_answers(lambda c: torch.nn.Linear(2, 3), lambda c: ([], []), classes=3, seal=seal.seal)


def test_rotation(empty_fleet: Any, kit: Any, tmp_path: Path) -> None:
    rotation = SecretRotation.fresh(3)
    for number in range(6):
        add(empty_fleet, kit, number, rotation.seal)
    started(empty_fleet, kit, tmp_path / "run", RotatedLabels(3))
    assert cohorts(tmp_path / "run") == plain_cohorts(5, 3, 6)


def test_chained_journal_and_what_clients_are_told(empty_fleet: Any, kit: Any, tmp_path: Path) -> None:
    for number in range(6):
        add(empty_fleet, kit, number, sealed)
    labels = EncryptedLabels(SECRET.public, keyholder())
    started(empty_fleet, kit, tmp_path / "run", labels, audit=True)
    kept = {
        str(m.content[RECORD]["commitment"]): f"node {m.metadata.dst_node_id}"
        for m in empty_fleet.grid.log
        if m.metadata.message_type == "train"
    }
    assert len(kept) == 5
    found = audit_journal(tmp_path / "run", seed=3, receipts=kept)
    assert found.confirmed and found.rounds == 5, found.problem


def test_noise_and_the_ledger_at_the_client(empty_fleet: Any, kit: Any, tmp_path: Path) -> None:
    """Counts are told once, however often they are asked for; every loss is a release; spent is spent."""
    import torch

    def ledger(context: Context) -> Ledger:
        return Ledger(epsilon=2.0, path=tmp_path / f"{context.node_config['client-name']}.ledger")

    def data(context: Context) -> tuple[Any, Any]:
        labels = np.repeat(np.arange(3), COUNTS[int(context.node_config["partition-id"])])
        return torch.ones(len(labels), 2), labels

    private = Private(ledger, GeometricNoise(epsilon=1.0), LossNoise(epsilon=0.5, bound=3.0))
    private_answers = torch_answers(lambda c: torch.nn.Linear(2, 3), data, classes=3, private=private)
    assert private_answers.gradient is None and private_answers.signals == {Signal.LOSS}
    for number in range(6):
        empty_fleet.grid.add(empty_fleet.node(number, cohort_client(kit.client_app(), private_answers)))
    started(empty_fleet, kit, tmp_path / "run", NoisyLabels(3))
    assert [len(Ledger(2.0, path=tmp_path / f"{n}.ledger").releases) for n in NAMES[:6]] == [1] * 6
    table, _ = read_journal(tmp_path / "run").table()
    assert np.allclose(table.label_counts.sum(axis=1), 10) and not np.array_equal(table.label_counts, COUNTS[:6])
    context = Context(
        run_id=1, node_id=1, node_config={"client-name": "client-0", "partition-id": 0}, state=None, run_config={},
        series_id=1,
    )  # fmt: skip
    arrays = ArrayRecord(torch.nn.Linear(2, 3).state_dict())
    assert private_answers.losses is not None
    for _ in range(2):
        assert np.isfinite(private_answers.losses(arrays, context, arrays)["loss"])
    with pytest.raises(PermissionError, match="another release"):
        private_answers.losses(arrays, context, arrays)


@pytest.mark.parametrize("selector", ["fedcbs", "balanced"])
@pytest.mark.parametrize("claim", [(1e200, 0, 0), (1e308, 1e308, 1e308), (8, 5, 3)], ids=str)
def test_noisy_counts_beyond_a_clients_size_keep_that_client_out(
    claim: Any, selector: str, empty_fleet: Any, kit: Any, tmp_path: Path, caplog: Any
) -> None:
    def seal(name: str, counts: Any) -> bytes:
        return pack_noisy_counts(name, claim if name == "client-0" else counts)

    for number in range(6):
        add(empty_fleet, kit, number, seal)
    journal = tmp_path / "run"
    strategy = empty_fleet.strategy(selector, journal=journal, cohort_size=3, labels=NoisyLabels(3), wait_for=5)
    strategy.start(empty_fleet.grid, kit.model(), num_rounds=4)
    with closing(read_journal(journal)) as record:
        assert record.table()[0].names == tuple(NAMES[1:6])
    assert f"'client-0' sum to {sum(claim):g} samples; it may have at most" in caplog.text


def test_the_server_side_holds_no_secret(empty_fleet: Any, kit: Any, tmp_path: Path) -> None:
    """Whatever the opener, the strategy and the messages hold, the secret key is not among it."""
    for number in range(6):
        add(empty_fleet, kit, number, sealed)

    class Elsewhere:
        """Stands for the wire: nothing behind it belongs to the server."""

        def __init__(self, holder: KeyHolder) -> None:
            self.public, self.admit, self.products, self.confirm = (
                holder.public, holder.admit, holder.products, holder.confirm,
            )  # fmt: skip

    labels = EncryptedLabels(SECRET.public, Elsewhere(keyholder()))
    started(empty_fleet, kit, tmp_path / "run", labels)
    said = [r.content[RECORD] for r in empty_fleet.grid.replies if RECORD in r.content]
    described = [record for record in said if "sealed-labels" in record]
    assert len(described) == 6 and not any("label-counts" in record for record in described)
    sent = [bytes(record["sealed-labels"]) for record in described]
    assert len(set(sent)) == 6 and all(len(data) < 2_000 for data in sent)
    reached: set[int] = set()
    waiting: list[Any] = [labels, empty_fleet.grid.log, empty_fleet.grid.replies]
    while waiting:
        thing = waiting.pop()
        if id(thing) in reached or isinstance(thing, (type, Elsewhere)):
            continue
        reached.add(id(thing))
        assert not isinstance(thing, SecretKey)
        assert not (isinstance(thing, bytes) and (SECRET.body[:64] in thing or SECRET.body[-32:] in thing))
        waiting += [
            x for x in gc.get_referents(thing) if not hasattr(x, "__globals__") and not isinstance(x, type(sys))
        ]
    assert len(reached) > 100


class Accountant:
    """Flower's accountant without the package it needs: it only counts releases."""

    def __init__(self) -> None:
        self.config = PrivacyConfig(
            target_delta=1e-5,
            population_size=6,
            neighboring_relation=next(iter(NeighboringRelation)),
            sampling_method=SamplingMethod.NO_AMPLIFICATION,
        )
        self.releases = 0

    def would_exceed(self, event: Any) -> bool:
        return False

    def compose(self, event: Any) -> None:
        self.releases += 1

    def get_privacy_spent(self) -> Any:
        return SimpleNamespace(epsilon=float(self.releases), delta=1e-5, num_releases=self.releases)


def accounted(fleet: Any, kit: Any, trouble: int = 0, **kwargs: Any) -> Accountant:
    """A run of uniform under Flower's central DP with an accountant; the first ``trouble`` clients always fail."""

    def train(message: Any, context: Context) -> Any:
        if int(context.node_config["partition-id"]) < trouble:
            raise RuntimeError("gone")
        reply = kit.step(message, context)
        reply["metrics"]["num-examples"] = 10  # the accountant wants equal weights
        return reply

    for number in range(6):
        fleet.grid.add(fleet.node(number, cohort_client(kit.client_app(train), kit.ANSWERS)))
    accountant = Accountant()
    inner = DifferentialPrivacyServerSideFixedClipping(
        FedAvg(fraction_evaluate=0.0), 1.0, 1.0, 3, accountant=accountant
    )
    fleet.strategy("uniform", strategy=inner, cohort_size=3, seed=1, **kwargs).start(
        fleet.grid, kit.model(counter=False), num_rounds=4
    )
    return accountant


def test_flowers_central_dp_counts_every_round_when_everybody_answers(empty_fleet: Any, kit: Any) -> None:
    assert accounted(empty_fleet, kit).releases == 4


def test_flowers_central_dp_goes_on_without_those_that_fail(empty_fleet: Any, kit: Any) -> None:
    assert accounted(empty_fleet, kit, trouble=3, tries=2).releases == 4


def test_flowers_central_dp_gives_up_when_too_many_fail(empty_fleet: Any, kit: Any) -> None:
    with pytest.raises(RoundError, match="no model in 2 tries"):
        accounted(empty_fleet, kit, trouble=4, tries=2)


def test_flowers_secagg_belongs_to_its_own_workflow(empty_fleet: Any, kit: Any) -> None:
    """The mod only answers SecAggPlusWorkflow, which samples clients itself and takes no strategy of this kind."""
    for number in range(6):
        app = kit.client_app(mods=[secaggplus_mod])
        empty_fleet.grid.add(empty_fleet.node(number, cohort_client(app, kit.ANSWERS)))
    strategy = empty_fleet.strategy("uniform", cohort_size=3, tries=1)
    with pytest.raises(RoundError, match="secaggplus_configs"):
        strategy.start(empty_fleet.grid, kit.model(), num_rounds=1)


_SERVER = '''
from pathlib import Path
import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from fedcohort.hosts.flower import CohortStrategy
from fedcohort.privacy.label_decoders import EncryptedLabels
from fedcohort.privacy.service import RemoteKeyHolder

app = ServerApp()

def in_memory(prefix, reversed_rest):
    """Whether this process holds prefix + rest anywhere; the two are never put together here."""
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps:
            span, rights = line.split()[:2]
            if "r" not in rights or line.rstrip().endswith(("[vvar]", "[vsyscall]")):
                continue
            first, last = (int(x, 16) for x in span.split("-"))
            try:
                memory.seek(first)
                data = memory.read(last - first)
            except (OSError, ValueError, OverflowError):
                continue
            at = data.find(prefix)
            while at >= 0:
                rest = data[at + len(prefix) : at + len(prefix) + len(reversed_rest)]
                if rest[::-1] == reversed_rest:
                    return True
                at = data.find(prefix, at + 1)
    return False

@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    holder = Path(config["holder"])
    remote = RemoteKeyHolder(config["url"], holder / "token", authority=config["authority"])
    strategy = CohortStrategy(
        "fedcbs", strategy=FedAvg(fraction_evaluate=0.0), journal=config["journal"], seed=3, cohort_size=3, wait_for=8,
        deadline=60.0, patience=200.0, labels=EncryptedLabels(holder / "public.key", remote), audit=True,
    )
    strategy.start(grid, ArrayRecord([np.zeros((2, 3))]), num_rounds=5)
    for name, needle in (pair.split("=") for pair in config["needles"].split(",")):
        prefix, rest = (bytes.fromhex(x) for x in needle.split("-"))
        print(f"MEMORY {name} {in_memory(prefix, rest)}")
'''
_CLIENT = """
from pathlib import Path
import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from fedcohort.hosts.flower import Answers, Facts, cohort_client
from fedcohort.privacy.scheme import LabelSeal

COUNTS = {counts}
app = ClientApp()

@app.train()
def train(message: Message, context: Context) -> Message:
    (value,) = message.content["arrays"].to_numpy_ndarrays()
    reply = {{"arrays": ArrayRecord([value + 1]), "metrics": MetricRecord({{"num-examples": 1}})}}
    return Message(RecordDict(reply), reply_to=message)

def mine(context):
    name = str(context.node_config["client-name"])
    return name, COUNTS[int(context.node_config["partition-id"])], LabelSeal("{public}", f"{keys}/{{name}}.key")

def facts(context: Context) -> Facts:
    name, counts, seal = mine(context)
    return Facts(size=sum(counts), sealed_labels=seal.seal(name, counts))

def confirm(context: Context, confirmation: bytes) -> str:
    name, counts, seal = mine(context)
    return seal.confirm(name, counts, confirmation)

app = cohort_client(app, Answers(facts=facts, confirm=confirm))
"""


def tls_files(folder: Path) -> tuple[Path, Path]:
    """A certificate for the loopback address, from openssl's own command."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-keyout", "tls.key", "-out", "tls.pem", "-subj", "/CN=keyholder", "-addext", "subjectAltName=IP:127.0.0.1"],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip
    return folder / "tls.pem", folder / "tls.key"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_superlink_eight_supernodes_and_a_key_holder(kit: Any, tmp_path: Path) -> None:
    """Real processes for every role; cohorts as with plain counts; the ServerApp's memory searched for the key."""
    holder = tmp_path / "holder"
    command = [sys.executable, "-m", "fedcohort.cli.app", "privacy", "keyholder"]
    lines = [
        subprocess.run(
            [*command, "client-key", str(tmp_path / f"{name}.key"), "--name", name],
            check=True, capture_output=True, text=True,
        ).stdout
        for name in NAMES
    ]  # fmt: skip
    (tmp_path / "clients.txt").write_text("".join(lines))
    subprocess.run(
        [*command, "new", str(holder), "--classes", "3", "--clients", str(tmp_path / "clients.txt")], check=True
    )
    certificate, key = tls_files(tmp_path)
    client = _CLIENT.format(counts=COUNTS.tolist(), public=holder / "public.key", keys=tmp_path)
    config = dict.fromkeys(("journal", "holder", "url", "authority", "needles"), "")
    app = kit.flower_app(tmp_path / "app", "sealed", _SERVER, client, config)
    secret = SecretKey.from_bytes((holder / "secret.key").read_bytes())
    public = PublicKey.from_bytes((holder / "public.key").read_bytes())

    def needle(body: bytes) -> str:
        return f"{body[:16].hex()}-{body[16:32][::-1].hex()}"

    serving = subprocess.Popen(
        [*command, "serve", str(holder), "--port", "0", "--certificate", str(certificate), "--key", str(key)],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert serving.stderr is not None
        url = serving.stderr.readline().split(" at ")[1].strip()
        assert url.startswith("https://")
        federation = kit.Loopback(tmp_path / "home", nodes=8, node_config=[f'client-name="{n}"' for n in NAMES])
        config = {
            "journal": str(tmp_path / "run"), "holder": str(holder), "url": url, "authority": str(certificate),
            "needles": f"secret={needle(secret.body)},public={needle(public.body)}",
        }  # fmt: skip
        with federation:
            done = federation.run(app, config, timeout=600)
        assert done.status == 0 and "raised an exception" not in done.log, done.log
    finally:
        serving.terminate()
        serving.wait(20)
    assert cohorts(tmp_path / "run") == plain_cohorts(5, 3)
    assert "MEMORY secret False" in done.log, done.log
    assert "MEMORY public True" in done.log, done.log  # the search does find what is there
    found = audit_journal(tmp_path / "run", seed=3)
    assert found.confirmed and found.rounds == 5
