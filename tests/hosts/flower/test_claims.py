"""A client's false claim about its data affects only this client: it is reported, and the run continues."""

from __future__ import annotations

import dataclasses
import logging
import re
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message
from flwr.serverapp.strategy import FedAvg

from fedcohort.core.errors import InputError, ParameterError
from fedcohort.hosts.flower import CohortStrategy, Facts, cohort_client
from fedcohort.hosts.flower.roster import Roster
from fedcohort.journal import read_journal
from fedcohort.privacy.label_decoders import RotatedLabels
from fedcohort.privacy.rotation import SecretRotation
from fedcohort.session import Session

Change = Callable[[ConfigRecord], None]


def claiming(kit: Any, change: Change) -> Any:
    """A ClientApp whose description is changed before it is sent."""
    honest = cohort_client(kit.client_app(), kit.ANSWERS)

    def app(message: Message, context: Any) -> Message:
        reply = honest(message, context)
        if message.metadata.message_type == "query.fedcohort_describe":
            change(reply.content["fedcohort"])
        return reply

    return app


def record_with(**values: Any) -> Change:
    def change(record: ConfigRecord) -> None:
        for key, value in values.items():
            record[key.replace("_", "-")] = value

    return change


def no_counts_but_the_claim(record: ConfigRecord) -> None:
    del record["label-counts"]
    record["signals"] = [*record["signals"], "label-products", "label-counts"]


def no_size_but_the_claim(record: ConfigRecord) -> None:
    del record["size"]
    record["signals"] = [*record["signals"], "sizes"]


def attributes(count: int, value: Any = 1) -> Change:
    def change(record: ConfigRecord) -> None:
        for i in range(count):
            record[f"attribute:a{i}"] = value

    return change


# The claim, and the message about it.
CLAIMS: dict[str, tuple[Change, str]] = {
    "label products that are not there": (no_counts_but_the_claim, "cannot supply 'label-(products|counts)'"),
    "sizes that are not there": (no_size_but_the_claim, "cannot supply 'sizes'"),
    "10,000 classes": (record_with(label_counts=[1] * 10_000, size=10_000), "names 10000 classes; there are 2"),
    "one class too many": (record_with(label_counts=[1, 1, 1]), "names 3 classes; there are 2"),
    "10,001 classes": (record_with(label_counts=[1] * 10_001), "10001 classes"),
    "more samples in classes than in all": (
        record_with(label_counts=[500, 6]),
        "506 samples in classes, but 10 in all",
    ),
    "a negative count": (record_with(label_counts=[8, 5, -3]), "'label-counts'.*-3"),
    "counts that are no whole numbers": (record_with(label_counts=[1.5, 2.0]), "'label-counts'.*1.5"),
    "counts that are truth values": (record_with(label_counts=[True, False]), "'label-counts'.*True"),
    "a count beyond all counting": (record_with(label_counts=[2**60, 1]), f"'label-counts'.*{2**60}"),
    "a size that is no number": (record_with(size=float("nan")), "'size'.*nan"),
    "a negative size": (record_with(size=-1), "'size'.*-1"),
    "a size beyond all counting": (record_with(size=2**60), f"'size'.*{2**60}"),
    "a version of a million characters": (record_with(version="9" * 1_000_000), "of 1000000 characters"),
    "101 attributes": (attributes(101), "101 attributes"),
    "100,000 attributes": (attributes(100_000), "100000 attributes"),
    "a long attribute": (attributes(1, "x" * 201), "attribute 'a0'.*201 characters"),
    "an attribute of another kind": (attributes(1, b"x"), "attribute 'a0'"),
    "an attribute without end": (attributes(1, float("inf")), "attribute 'a0'.*inf"),
    "an attribute of control characters": (attributes(1, "\x1b[2J"), "attribute 'a0'"),
}


# `balanced` does without facts that some clients do not supply, and `astraea` needs no sizes.
WITHOUT = {
    ("label products that are not there", "balanced"),
    ("sizes that are not there", "balanced"),
    ("sizes that are not there", "astraea"),
}


@pytest.mark.parametrize("selector", ["fedcbs", "balanced", "astraea"])
@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claim_binds_its_maker_only(
    claim: str, selector: str, fleet: Any, kit: Any, tmp_path: Path, caplog: Any
) -> None:
    change, said = CLAIMS[claim]
    fleet.grid.nodes[fleet.grid.node_of("client-0")].app = claiming(kit, change)
    strategy = fleet.strategy(selector, FedAvg(fraction_evaluate=0.0), cohort_size=2, journal=tmp_path / "j")
    with caplog.at_level(logging.WARNING, "flwr.fedcohort"):
        strategy.start(fleet.grid, kit.model(), num_rounds=3)
    with closing(read_journal(tmp_path / "j")) as record:
        table, _ = record.table()
        assert len(record.cohorts()) == 3
    if (claim, selector) in WITHOUT:
        assert table.n == 6
        if selector == "balanced":
            lacking = "sizes" if "sizes" in claim else "label-products"
            assert f"'{lacking}', which client-0 cannot supply" in caplog.text
        return
    assert table.names == tuple(f"client-{i}" for i in range(1, 6))
    assert table.label_counts.tolist() == [[i, 10] for i in range(1, 6)]
    lines = [line for line in caplog.messages if "is left out" in line or "cannot be read" in line]
    assert len(lines) == 1 and re.search(said, lines[0]), lines


def test_who_names_too_many_classes_may_take_part_where_labels_do_not_matter(fleet: Any, kit: Any) -> None:
    fleet.grid.nodes[fleet.grid.node_of("client-0")].app = claiming(kit, CLAIMS["one class too many"][0])
    fleet.strategy("all", FedAvg(fraction_evaluate=0.0)).start(fleet.grid, kit.model(), num_rounds=1)
    assert len(fleet.names(1)) == 6


def test_ten_thousand_classes_cost_nothing(fleet: Any, kit: Any, tmp_path: Path) -> None:
    fleet.grid.nodes[fleet.grid.node_of("client-0")].app = claiming(kit, CLAIMS["10,000 classes"][0])
    begun = time.process_time()
    strategy = fleet.strategy("balanced", FedAvg(fraction_evaluate=0.0), cohort_size=2, journal=tmp_path / "j")
    strategy.start(fleet.grid, kit.model(), num_rounds=3)
    assert time.process_time() - begun < 20  # with these classes three rounds took minutes
    assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) < 5_000_000


@pytest.mark.parametrize(
    ("named", "classes", "left"),
    [
        ([3, 3, 3, 3, 3, 4], None, 5),  # nobody else names a fourth
        ([2, 3, 3, 2, 2, 2], None, 6),  # two name a third, which the others do not hold
        ([1, 2, 3, 4, 4, 4], None, 6),
        ([2, 2, 2, 2, 2, 2], 4, 6),  # the operator knows of classes that nobody holds
        ([3, 4, 4, 4, 4, 4], 3, 1),
    ],
)
def test_how_many_classes_there_are_is_not_said_by_one_client(
    named: list[int], classes: int | None, left: int, fleet: Any, kit: Any, tmp_path: Path
) -> None:
    for number, count in enumerate(named):
        app = claiming(kit, record_with(label_counts=[1] * count))
        fleet.grid.nodes[fleet.grid.node_of(f"client-{number}")].app = app
    strategy = fleet.strategy("fedcbs", FedAvg(fraction_evaluate=0.0, min_available_nodes=1, min_train_nodes=1),
                              cohort_size=1, journal=tmp_path / "j", classes=classes)  # fmt: skip
    strategy.start(fleet.grid, kit.model(), num_rounds=2)
    with closing(read_journal(tmp_path / "j")) as record:
        table, _ = record.table()
    assert table.n == left
    assert table.label_counts.shape[1] == (classes or max(n for n in named if named.count(n) > 1))


def test_the_number_of_classes_lasts(kit: Any, tmp_path: Path, caplog: Any) -> None:
    """The number of classes stays the same after a restart, for new clients and for new descriptions."""

    def run(rounds: int, change: Change | None, **more: Any) -> None:
        fleet = kit.Fleet()
        fleet.fill(4)
        if change is not None:
            fleet.grid.add(fleet.node(9, claiming(kit, change)))
            fleet.grid.add(fleet.node(10, claiming(kit, change)))
        strategy = fleet.strategy(
            "fedcbs", FedAvg(fraction_evaluate=0.0), cohort_size=2, journal=tmp_path / "j", **more
        )
        strategy.start(fleet.grid, kit.model(), num_rounds=rounds)

    run(2, None)
    with caplog.at_level(logging.WARNING, "flwr.fedcohort"):
        run(4, record_with(label_counts=[1, 1, 1]))
    assert "client 'client-9' is left out: it names 3 classes; there are 2" in caplog.text
    with Session.open(tmp_path / "j") as session:
        assert session.table.n == 4 and session.table.label_counts.shape == (4, 2)
    with pytest.raises(InputError, match=r"has 2 classes.*classes=3"):
        run(5, None, classes=3)
    run(5, record_with(label_counts=[1, 1]), classes=2)
    with Session.open(tmp_path / "j") as session:
        assert session.table.n == 6


def test_who_corrects_itself_takes_part(fleet: Any, kit: Any, tmp_path: Path) -> None:
    said = {"counts": [1, 1, 1]}

    def change(record: ConfigRecord) -> None:
        record["label-counts"] = said["counts"]

    fleet.grid.nodes[fleet.grid.node_of("client-0")].app = claiming(kit, change)
    fleet.clock.at.append((10.0, lambda: said.update(counts=[4, 5])))
    strategy = fleet.strategy("fedcbs", FedAvg(fraction_evaluate=0.0), cohort_size=2, journal=tmp_path / "j",
                              describe_every=5.0)  # fmt: skip
    strategy.start(fleet.grid, kit.model(), num_rounds=30)
    with Session.open(tmp_path / "j") as session:
        assert session.table.label_counts[session.table.index("client-0")].tolist() == [4, 5]


def test_an_attribute_that_is_nan_is_not_known(empty_fleet: Any, kit: Any) -> None:
    empty_fleet.grid.add(empty_fleet.node(0, claiming(kit, attributes(1, float("nan")))))
    roster = Roster(empty_fleet.grid, empty_fleet.clock, empty_fleet.clock.sleep)
    for _ in range(3):
        roster.refresh()
        empty_fleet.clock.sleep(0.5)
    assert roster.online["client-0"].description.attributes == {}


def test_a_wrong_number_of_classes_is_refused() -> None:
    for classes in (0, -1, 2.5, True, "ten"):
        with pytest.raises(ParameterError, match="'classes'"):
            CohortStrategy("uniform", classes=classes)


def test_hundreds_of_thousands_of_attributes_are_refused_in_a_moment(empty_fleet: Any, kit: Any) -> None:
    empty_fleet.fill(2)
    empty_fleet.grid.nodes[empty_fleet.grid.node_of("client-0")].app = claiming(kit, attributes(300_000, "x" * 100))
    roster = Roster(empty_fleet.grid, empty_fleet.clock, empty_fleet.clock.sleep)
    for _ in range(10):
        roster.refresh()
        empty_fleet.clock.sleep(0.5)
    assert list(roster.online) == ["client-1"]


def test_plain_counts_do_not_pass_for_sealed_ones(fleet: Any, kit: Any, tmp_path: Path, caplog: Any) -> None:
    """A client that does not encrypt its labels is left out, and the labels of the others are still opened."""
    rotation = SecretRotation(b"thirty-two bytes that are shared", 2)

    def sealed(context: Any) -> Facts:
        number = int(context.node_config["partition-id"])
        name = str(context.node_config["client-name"])
        return Facts(size=10 + number, sealed_labels=rotation.seal(name, [number, 10]))

    for number in range(1, 6):
        app = cohort_client(kit.client_app(), dataclasses.replace(kit.ANSWERS, facts=sealed))
        fleet.grid.nodes[fleet.grid.node_of(f"client-{number}")].app = app
    strategy = fleet.strategy("fedcbs", FedAvg(fraction_evaluate=0.0), cohort_size=2, journal=tmp_path / "j",
                              labels=RotatedLabels(2))  # fmt: skip
    with caplog.at_level(logging.WARNING, "flwr.fedcohort"):
        strategy.start(fleet.grid, kit.model(), num_rounds=2)
    assert "client 'client-0' is left out: it cannot supply 'label-products'" in caplog.text
    with closing(read_journal(tmp_path / "j")) as record:
        assert record.table()[0].n == 5
