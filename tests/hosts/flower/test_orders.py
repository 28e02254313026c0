"""An operator's orders during a run are carried out once, before the next round, and recorded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from flwr.serverapp.strategy import FedAvg
from typer.testing import CliRunner

from fedcohort.audit.participation import prove_participation
from fedcohort.audit.verification import examine
from fedcohort.cli.app import app
from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import FedcohortError
from fedcohort.core.protocol import RoundReport, RoundRequest
from fedcohort.hosts import orders
from fedcohort.hosts.flower import Facts, cohort_client
from fedcohort.hosts.orders import Order
from fedcohort.journal import read_journal
from fedcohort.selectors import Uniform
from fedcohort.session import Session
from fedcohort.session.rules import Rules


def command(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["journal", "rules", *map(str, arguments)])
    assert done.exit_code == 0, done.exception or done.output
    return " ".join(done.output.split())


def refused(*arguments: object) -> FedcohortError:
    done = CliRunner().invoke(app, ["journal", "rules", *map(str, arguments)])
    assert isinstance(done.exception, FedcohortError), done.output
    return done.exception


def changes(path: Path) -> list[dict[str, Any]]:
    with closing(read_journal(path)) as record:
        return record.events("rules")


def cohorts(path: Path) -> list[set[str]]:
    with closing(read_journal(path)) as record:
        table, _ = record.table()
        return [set(table.names_of(row.clients)) for row in record.cohorts()]


def at_round(fleet: Any, server_round: int, action: Callable[[], object]) -> None:
    """Do something while the cohort of a round trains."""
    done: list[int] = []

    def hook(message: Any) -> None:
        trains = message.metadata.message_type == "train"
        if trains and message.content["config"]["server-round"] == server_round and not done:
            done.append(1)
            action()

    fleet.grid.hooks.append(hook)


def test_a_client_is_blocked_pinned_and_paused_while_a_run_goes_on(fleet: Any, kit: Any, tmp_path: Path) -> None:
    path, said = tmp_path / "run.sqlite", []
    at_round(fleet, 5, lambda: said.append(command("apply", path, "--block", "client-0", "--pin", "client-5")))
    at_round(fleet, 10, lambda: said.append(command("apply", path, "--unpin", "client-5", "--pause", "client-1=6")))
    at_round(fleet, 20, lambda: said.append(command("apply", path, "--unblock", "client-0")))
    strategy = fleet.strategy("uniform", FedAvg(fraction_evaluate=0.0), cohort_size=3, journal=path, audit=True)
    strategy.start(fleet.grid, kit.model(), num_rounds=40)
    assert len(said) == 3 and all("running server" in line and "next cohort" in line for line in said)
    picked = cohorts(path)
    assert all("client-0" not in cohort for cohort in picked[5:20]) and any("client-0" in c for c in picked[20:])
    assert all("client-5" in cohort for cohort in picked[5:10]) and any("client-5" not in c for c in picked[10:])
    assert all("client-1" not in cohort for cohort in picked[10:16]) and any("client-1" in c for c in picked[16:])
    assert [(body["round"], body["rules"]) for body in changes(path)] == [
        (5, {"blocked": ["client-0"], "pinned": ["client-5"]}),
        (10, {"blocked": ["client-0"], "paused": {"client-1": 16}}),
        (20, {}),
    ]
    assert prove_participation(path).breaches == () and not orders.waiting(path)
    assert all(finding.valid is not False for finding in examine(path).findings)
    with closing(read_journal(path)) as record, Session.open(path) as session:
        assert "it is paused until round 16" in str(session.explain(12, "client-1"))
        assert len({body["order"] for body in record.events("rules")}) == 3


def test_a_file_of_rules_is_reloaded_while_the_run_waits(fleet: Any, kit: Any, tmp_path: Path) -> None:
    """A run whose rules admit nobody waits for an order, whose rules apply at once, with attributes."""
    path, file = tmp_path / "run.sqlite", tmp_path / "rules.toml"
    facts = lambda context: Facts(size=1, attributes={"battery": 20 * int(context.node_config["partition-id"])})  # noqa: E731
    for node in fleet.grid.nodes.values():
        node.app = cohort_client(kit.client_app(), kit.ANSWERS.__class__(facts=facts))
    file.write_text('[rules]\neligible = "battery >= 500"\n')
    at_round(fleet, 2, lambda: command("apply", path, file))
    waited: list[float] = []

    def ease() -> None:
        waited.append(fleet.clock.now)
        file.write_text('eligible = "battery >= 50"\nmin_separation = 2\n')
        command("apply", path, file)

    fleet.clock.at.append((60.0, ease))
    strategy = fleet.strategy("uniform", FedAvg(fraction_evaluate=0.0), cohort_size=1, journal=path, patience=300.0)
    strategy.start(fleet.grid, kit.model(), num_rounds=12)
    assert waited and fleet.clock.now > 60
    assert all(cohort <= {"client-3", "client-4", "client-5"} for cohort in cohorts(path)[2:])
    assert [body["round"] for body in changes(path)] == [2, 2]
    assert command("show", path) == '[rules] eligible = "battery >= 50" min_separation = 2'


def test_what_is_wrong_is_said_before_anything_is_ordered(tmp_path: Path) -> None:
    path, file = tmp_path / "run.sqlite", tmp_path / "rules.toml"
    names = ["clinic-north", "clinic-south", "kiosk-7"]
    Session(Uniform(), ClientTable(names=names), journal=path, rules=Rules(pinned=("kiosk-7",))).close()
    error = refused("apply", path, "--block", "clinic-nort", "--pause", "kiosk=3", "--unblock", "zzz")
    assert "'clinic-nort' (similar: 'clinic-north'" in error.message and "'kiosk' (similar: 'kiosk-7')" in error.message
    assert error.message.endswith("'zzz'.") or "'zzz'" in error.message
    assert "--allow-unknown" in str(error.hint)
    assert "block and pin the same client" in refused("apply", path, "--block", "kiosk-7").message
    assert "'kiosk-7' is not blocked" in refused("apply", path, "--unblock", "kiosk-7").message
    assert "'kiosk-7' is not paused" in refused("apply", path, "--resume", "kiosk-7").message
    for text, words in (
        ("min_seperation = 3", "no rule 'min_seperation'"),
        ("min_separation = 0", "'min_separation' parameter of Rules"),
        ('eligible = "battery >="', "battery >="),
        ("blocked = [", "not valid TOML"),
        ('blocked = ["clinic-norht"]', "similar: 'clinic-north'"),
        ("rules = 3", "must be a table"),
    ):
        file.write_text(text)
        assert words in refused("apply", path, file).message
    for arguments in ((), ("--pause", "kiosk-7"), ("--pause", "kiosk-7=0"), ("--pause", "kiosk-7=1e3")):
        done = CliRunner().invoke(app, ["journal", "rules", "apply", str(path), *arguments])
        assert done.exit_code == 2
    assert "no journal" in refused("apply", tmp_path / "other.sqlite", "--block", "kiosk-7").message
    assert not orders.waiting(path) and list(tmp_path.glob("*.orders/*")) == []
    # The second is judged by what the first will have changed, although nobody has taken that yet.
    command("apply", path, "--unpin", "kiosk-7")
    assert "stopped" in command("apply", path, "--block", "kiosk-7", "--block", "new-1", "--allow-unknown")
    assert len(orders.waiting(path)) == 2 and "not yet applied: 2" in command("show", path)
    with Session.open(path) as session:
        assert len(orders.take(session)) == 2 and orders.take(session) == []
        assert session.rules == Rules(blocked=("kiosk-7", "new-1"))


def test_a_client_is_found_in_either_form_of_unicode(tmp_path: Path) -> None:
    path, file = tmp_path / "run.sqlite", tmp_path / "rules.toml"
    Session(Uniform(), ClientTable(names=["Zu\u0308rich", "K\u00f6ln", "M\u00fcnchen"]), journal=path).close()
    file.write_text('blocked = ["Ko\u0308ln"]\n')
    command("apply", path, file, "--pin", "Mu\u0308nchen", "--pause", "Zu\u0308rich=2")
    with Session.open(path) as session:
        orders.take(session)
        assert session.rules == Rules(blocked=("K\u00f6ln",), pinned=("M\u00fcnchen",), paused={"Zu\u0308rich": 2})


def test_rules_that_cannot_be_kept_are_refused_before_and_when_they_are_taken(
    fleet: Any, kit: Any, tmp_path: Path
) -> None:
    path, file, said = tmp_path / "run.sqlite", tmp_path / "rules.toml", []
    file.write_text("min_separation = 5\n")

    def order() -> None:
        said.append(refused("apply", path, file).message)
        orders.give(path, Order(rules={"min_separation": 5}))  # without looking first

    at_round(fleet, 2, order)
    strategy = fleet.strategy("uniform", FedAvg(fraction_evaluate=0.0), cohort_size=3, journal=path)
    strategy.start(fleet.grid, kit.model(), num_rounds=10)
    assert "3 x 5 = 15" in said[0] and "6 clients" in said[0]
    with closing(read_journal(path)) as record:
        (body,) = record.events("order-refused")
    assert "3 x 5 = 15" in body["reason"] and changes(path) == [] and len(cohorts(path)) == 10


def test_orders_outlast_a_restart_of_the_app_with_its_own_rules(kit: Any, tmp_path: Path, caplog: Any) -> None:
    """An order survives a restart with the same rules in the app's code; changed rules in the code replace it."""
    path = tmp_path / "run.sqlite"

    def run(rounds: int, rules: Rules, order: tuple[str, ...] = ()) -> Any:
        fleet = kit.Fleet()
        fleet.fill(6)
        if order:
            at_round(fleet, rounds - 1, lambda: command("apply", path, *order))
        strategy = fleet.strategy("uniform", FedAvg(fraction_evaluate=0.0), cohort_size=2, journal=path, rules=rules)
        strategy.start(fleet.grid, kit.model(), rounds)

    run(3, Rules(blocked=("client-5",)), ("--block", "client-0"))
    command("apply", path, "--block", "client-1")  # while it is stopped
    run(12, Rules(blocked=("client-5",)))
    assert [body["rules"] for body in changes(path)] == [
        {"blocked": ["client-5"]},
        {"blocked": ["client-5", "client-0"]},
        {"blocked": ["client-5", "client-0", "client-1"]},
    ]
    assert [body["round"] for body in changes(path)] == [0, 2, 3]
    assert set().union(*cohorts(path)[3:]) == {"client-2", "client-3", "client-4"}
    run(14, Rules(blocked=("client-4",)))
    assert changes(path)[-1]["rules"] == {"blocked": ["client-4"]} and "rules was" in caplog.text


KILLED = """
import os, signal, sys
from pathlib import Path
from fedcohort.hosts import orders
from fedcohort.session import Session
path, after = sys.argv[1], sys.argv[2]
session = Session.open(path, commit=sys.argv[3])
def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
if after == "unlink":
    Path.unlink = die
elif after == "commit":
    type(session).commit = die
else:
    type(session).set_rules = die
orders.take(session)
"""


@pytest.mark.parametrize(("moment", "commit"), [("set_rules", "manual"), ("commit", "manual"), ("unlink", "always")])
def test_an_order_is_carried_out_once_whatever_is_killed_when(moment: str, commit: str, tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    with Session(Uniform(), ClientTable(names=["anna", "ben", "cem"]), journal=path) as session:
        cohort = session.ask(RoundRequest(1))
        session.tell(RoundReport(cohort.ticket, cohort.clients))
    orders.give(path, Order(pause={"ben": 10}))
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path), moment, commit], check=False)
    assert killed.returncode == -signal.SIGKILL
    with Session.open(path) as session:
        for _ in range(3):  # rounds pass: a pause counted again would end later
            cohort = session.ask(RoundRequest(1, ["anna", "cem"]))
            session.tell(RoundReport(cohort.ticket, cohort.clients))
        orders.take(session)
        assert session.rules == Rules(paused={"ben": 11 if moment == "unlink" else 14}) and not orders.waiting(path)
    assert len(changes(path)) == 1


def test_nobody_else_is_obeyed(tmp_path: Path, caplog: Any) -> None:
    path, folder = tmp_path / "run.sqlite", tmp_path / "run.sqlite.orders"
    body = json.dumps({"block": ["anna"], "id": "1"})
    with Session(Uniform(), ClientTable(names=["anna", "ben"]), journal=path) as session:
        folder.mkdir()
        folder.chmod(0o777)
        (folder / "1").write_text(body)
        for _ in range(3):
            assert orders.take(session) == []
        assert caplog.text.count("can write to it") == 1  # although a host checks all the time
        with pytest.raises(FedcohortError, match="only the journal's owner"):
            orders.give(path, Order(block=["anna"]))
        folder.chmod(0o700)
        (folder / "1").chmod(0o666)
        assert orders.take(session) == []
        (folder / "1").unlink()
        (tmp_path / "elsewhere").write_text(body)
        (folder / "2").symlink_to(tmp_path / "elsewhere")
        os.mkfifo(folder / "3")
        assert orders.take(session) == []  # it waits for nobody to write to the pipe
        (folder / "3").unlink()
        texts = ["", "[]", "{", '{"block": "anna"}', '{"pause": {"anna": "x"}}', '{"so": 1}']
        lists: dict[str, Any] = {key: [] for key in ("block", "unblock", "pin", "unpin", "resume")}
        for rules in (5, [], "x", {"of a later version": 1}):  # all else is as it should be
            texts.append(json.dumps({**lists, "id": "5", "rules": rules}))
        for i, text in enumerate(texts):
            (folder / f"4{i}").write_text(text)
        orders.give(path, Order(unblock=["anna"]))  # nobody is blocked
        orders.give(path, Order(block=["ben"]))
        assert [order.block for order in orders.take(session)] == [["ben"]]
        assert session.rules == Rules(blocked=("ben",))
        assert [file.name for file in folder.iterdir()] == ["2"]
        (body_,) = session.journal.events("order-refused")
        assert "'anna' is not blocked" in body_["reason"]
        assert "Got {'of a later version': 1}" in caplog.text
    assert (folder.stat().st_mode & 0o777) == 0o700


def test_orders_written_by_hand_need_only_what_they_change(tmp_path: Path, caplog: Any) -> None:
    path, folder = tmp_path / "run.sqlite", tmp_path / "run.sqlite.orders"
    with Session(Uniform(), ClientTable(names=["anna", "ben", "cem"]), journal=path) as session:
        folder.mkdir(mode=0o700)

        def hand_in(text: str) -> list[Order]:
            (folder / "order.json").write_text(text)
            return orders.take(session)

        (order,) = hand_in('{"block": ["anna"]}')
        assert order.block == ["anna"] and session.rules == Rules(blocked=("anna",))
        hand_in('{"pause": {"ben": 2}}')  # in a file of the same name
        hand_in('{"unblock": ["anna"]}')
        hand_in('{"rules": {"min_separation": 2}, "pin": ["cem"]}')
        assert session.rules == Rules(min_separation=2, pinned=("cem",)) and len(changes(path)) == 4
        for text, words in (
            ('{"pause": true}', "'pause' of an order must give each client a whole number of rounds"),
            ('{"pause": {"ben": true}}', "Got {'ben': True}"),
            ('{"pause": {"ben": 0}}', "at least 1"),
            ('{"pause": {"ben": 1e3}}', "Got {'ben': 1000.0}"),
            ('{"pause": ["ben"]}', "Got ['ben']"),
            ('{"block": true}', "'block' of an order must be a list of clients' names. Got True"),
            ('{"resume": [true]}', "'resume' of an order must be a list of clients' names. Got [True]"),
            ('{"unpin": null}', "'unpin' of an order must be a list of clients' names. Got None"),
            ('{"id": 7}', "'id' of an order must be a text. Got 7"),
            (
                '{"blok": ["ben"]}',
                "block, id, pause, pin, resume, rules, selector, trial, unblock, unpin, watch. Got 'blok'",
            ),
            ("[]", "Got []"),
        ):
            caplog.clear()
            assert hand_in(text) == [] and words in caplog.text, text
        assert session.rules == Rules(min_separation=2, pinned=("cem",)) and list(folder.iterdir()) == []


def test_an_order_written_by_hand_is_carried_out_once_if_the_server_is_killed_before_it_is_deleted(
    tmp_path: Path,
) -> None:
    path, folder = tmp_path / "run.sqlite", tmp_path / "run.sqlite.orders"
    Session(Uniform(), ClientTable(names=["anna", "ben"]), journal=path).close()
    folder.mkdir(mode=0o700)
    (folder / "order.json").write_text('{"pause": {"ben": 10}}')
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path), "unlink", "always"], check=False)
    assert killed.returncode == -signal.SIGKILL and (folder / "order.json").exists()
    with Session.open(path) as session:
        assert orders.take(session) == [] and not orders.waiting(path)
    assert len(changes(path)) == 1
