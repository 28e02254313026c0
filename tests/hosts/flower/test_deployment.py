"""Real processes: TLS with node authentication, and everything that can break, breaking."""

from __future__ import annotations

import datetime
import ipaddress
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID
from safetensors.numpy import load_file
from typer.testing import CliRunner

from fedcohort.audit.participation import prove_participation
from fedcohort.cli.app import app as cli
from fedcohort.core.protocol import Status
from fedcohort.hosts.flower import failures
from fedcohort.journal import is_blank, read_journal
from fedcohort.journal.presence import Presence, RunState, run_state
from fedcohort.report.account import read_account

from .loopback import Certificates

# On a busy machine whoever is valid may be slow: only where a test is about lateness is the deadline short.
_CONFIG = {
    "rounds": 2,
    "cohort": 2,
    "wait-for": 2,
    "deadline": 900.0,
    "tries": 3,
    "journal": "",
    "registered-only": False,
}
_SERVER = """
import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from fedcohort.hosts.flower import CohortStrategy

app = ServerApp()

@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    strategy = CohortStrategy(
        "uniform", strategy=FedAvg(fraction_evaluate=0.0), journal=config["journal"], seed=3,
        cohort_size=config["cohort"], wait_for=config["wait-for"], deadline=config["deadline"], patience=900.0,
        tries=config["tries"], registered_only=config["registered-only"],
    )
    strategy.start(grid, ArrayRecord([np.zeros((2, 3))]), num_rounds=config["rounds"])
"""
_CLIENT = """
import io
import time
import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from fedcohort.hosts.flower.client import cohort_client

app = ClientApp()

def hostile(message: Message) -> RecordDict:
    # Another reply of those that once ended runs, in every round.
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,), }\\n"
    claims = b"\\x93NUMPY\\x01\\x00" + len(header).to_bytes(2, "little") + header + bytes(48)
    nested = b"\\x93NUMPY\\x01\\x00\\x90\\x01" + b"(" * 400
    file = io.BytesIO()
    np.savez(file, np.zeros((2, 3)))
    arrays = [
        Array(np.full((2, 3), "a")), Array(np.full((2, 3), b"a")), Array(np.zeros((2, 3), "M8[s]")),
        Array(np.zeros((2, 3), [("a", "f4")])), Array(np.zeros((2, 3), complex)),
        Array(np.zeros((2, 3), np.longdouble)),
        Array("float64", (2, 3), "numpy.ndarray", file.getvalue()), Array("float64", (2, 3), "numpy.ndarray", claims),
        Array("float64", (2, 3), "numpy.ndarray", nested),
    ]
    turn = int(message.content["config"]["server-round"]) - 1
    metrics = {"num-examples": 1}
    if turn >= len(arrays):
        metrics["num-examples"] = -1
    array = arrays[turn] if turn < len(arrays) else Array(np.zeros((2, 3)))
    return RecordDict({"arrays": ArrayRecord({"0": array}), "metrics": MetricRecord(metrics)})

@app.train()
def train(message: Message, context: Context) -> Message:
    (value,) = message.content["arrays"].to_numpy_ndarrays()
    value = value + 1
    match context.node_config.get("trouble"):
        case "late":
            time.sleep(20)
        case "nan":
            value[0, 0] = np.nan
        case "shape":
            value = value.T
        case "hostile":
            return Message(hostile(message), reply_to=message)
    reply = {"arrays": ArrayRecord([value]), "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(reply), reply_to=message)

app = cohort_client(app)
"""


def small_app(kit: Any, folder: Path) -> Path:
    """An app without torch whose model grows by one in every round that averages anything."""
    return kit.flower_app(folder, "small", _SERVER, _CLIENT, _CONFIG)


def certificates(folder: Path) -> Certificates:
    """An authority of our own and a certificate for the loopback address, as in Flower's documentation."""
    now = datetime.datetime.now(datetime.UTC)
    keys = [rsa.generate_private_key(public_exponent=65537, key_size=2048) for _ in range(2)]
    names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in ("Test authority", "localhost")]
    made = []
    for key, name in zip(keys, names, strict=True):
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(names[0])
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=name == names[0], path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(keys[0].public_key()), critical=False)
        )
        if name != names[0]:
            addresses = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
            builder = builder.add_extension(x509.SubjectAlternativeName(addresses), critical=False)
        else:
            usage = dict.fromkeys(
                ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
                 "encipher_only", "decipher_only"), False,
            )  # fmt: skip
            builder = builder.add_extension(x509.KeyUsage(key_cert_sign=True, crl_sign=True, **usage), critical=True)
        made.append(builder.sign(keys[0], hashes.SHA256()))
    files = Certificates(folder / "ca.crt", folder / "server.pem", folder / "server.key")
    files.authority.write_bytes(made[0].public_bytes(serialization.Encoding.PEM))
    files.certificate.write_bytes(made[1].public_bytes(serialization.Encoding.PEM))
    files.key.write_bytes(
        keys[1].private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
    )
    return files


def node_key(folder: Path, name: str) -> Path:
    """A key as ``ssh-keygen -t ecdsa -b 384`` writes it."""
    key = ec.generate_private_key(ec.SECP384R1())
    path = folder / name
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())
    )
    Path(f"{path}.pub").write_bytes(
        key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    )
    return path


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_tls_with_node_authentication(kit: Any, tmp_path: Path) -> None:
    """Two registered nodes take part under the names they were registered with; one with an unknown key does not."""
    app = small_app(kit, tmp_path / "app")
    journal = tmp_path / "journal"
    federation = kit.Loopback(
        tmp_path / "home",
        nodes=3,
        certificates=certificates(tmp_path),
        node_keys=[node_key(tmp_path, f"key-{i}") for i in range(3)],
        node_names=["clinic-north", "clinic-south", None],
        node_config=['client-name="says-north"', 'client-name="says-south"', 'client-name="intruder"'],
    )
    with federation:
        done = federation.run(app, {"journal": str(journal), "registered-only": True}, timeout=900)
        assert done.status == 0 and "raised an exception" not in done.log, done.log
    record = read_journal(journal)
    assert record.table()[0].names == ("clinic-north", "clinic-south")
    assert len(record.cohorts()) == 2 and {r.status for r in record.replies()} == {Status.OK}
    proof = prove_participation(journal)
    assert (proof.registered, proof.unregistered) == (4, 0)


def rounds_told(journal: Path) -> int:
    if is_blank(journal):
        return 0
    record = read_journal(journal)
    try:
        return sum(row.told_at is not None for row in record.cohorts())
    finally:
        record.close()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_everything_breaks_and_the_run_completes(kit: Any, tmp_path: Path) -> None:
    """20 rounds: nodes killed and restarted, one always late, one NaN, one of another shape, two ServerApp kills."""
    app = small_app(kit, tmp_path / "app")
    journal = tmp_path / "journal"
    trouble = ["", "", "", "", "late", "nan", "shape"]
    federation = kit.Loopback(
        tmp_path / "home",
        nodes=7,
        node_config=[f'client-name="client-{i}"' + (f' trouble="{t}"' if t else "") for i, t in enumerate(trouble)],
    )
    config = {"rounds": 20, "cohort": 4, "wait-for": 4, "deadline": 12.0, "tries": 1000, "journal": str(journal)}

    def reach(rounds: int) -> None:
        federation.watch(run, lambda: rounds_told(journal) >= rounds, 900)

    with federation:
        run = federation.start_run(app, config)
        reach(2)
        federation.kill_node(3)
        reach(4)
        assert federation.kill_serverapp()
        run = federation.start_run(app, config)
        reach(6)
        federation.start_node(3)
        federation.kill_node(0)
        reach(9)
        federation.start_node(0)
        reach(11)
        assert federation.kill_serverapp()
        run = federation.start_run(app, config)
        reach(13)
        federation.kill_node(1)
        federation.kill_node(3)
        reach(15)
        federation.start_node(1)
        federation.start_node(3)
        done = federation.wait(run, 900)
        assert done.status == 0 and "raised an exception" not in done.log, done.log
    record = read_journal(journal)
    rows, replies = record.cohorts(), record.replies()
    # A round that gave no model was tried again; each has exactly one cohort that counts.
    given_up = {body["ticket"] for body in record.events("abandoned")}
    assert Counter(row.round for row in rows if row.ticket not in given_up) == Counter(range(20))
    assert all(row.told_at is not None for row in rows)
    assert len({(r.ticket, r.client) for r in replies}) == len(replies) == sum(len(row.clients) for row in rows)
    assert set(record.table()[0].names) == {f"client-{i}" for i in range(7)}
    # Every round moved the global model by one, exactly once.
    averaged = {r.ticket for r in replies if r.kept}
    assert len(averaged) == 20 and not averaged & given_up
    (last,) = [f for f in (tmp_path / "journal.checkpoints").iterdir() if "000020" in f.name]
    np.testing.assert_allclose(load_file(last)["model/0"], np.full((2, 3), len(averaged)), rtol=1e-6)
    # The report says who failed and why.
    found = failures(journal)
    by_client: dict[str, list[Any]] = {}
    for failure in found:
        by_client.setdefault(failure.client, []).append(failure)
    assert {f.status for f in by_client["client-5"]} <= {Status.INVALID, Status.LATE, Status.MISSING}
    assert any("NaN" in f.reason for f in by_client["client-5"])
    assert any("the shape (3, 2) instead of (2, 3)" in f.reason for f in by_client["client-6"])
    assert {f.status for f in by_client["client-4"]} <= {Status.LATE, Status.MISSING}
    assert any(f.status == Status.LATE and "answered after" in f.reason for f in by_client["client-4"])
    assert all(f.reason for f in found)
    assert "client-2" not in by_client or {f.status for f in by_client["client-2"]} <= {Status.LATE, Status.MISSING}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_hostile_replies_end_no_run(kit: Any, tmp_path: Path) -> None:
    """One node sends another hostile reply in each of ten rounds; the model is the mean of the two others."""
    app = small_app(kit, tmp_path / "app")
    journal = tmp_path / "journal"
    trouble = ["", "", ' trouble="hostile"']
    names = [f'client-name="client-{i}"{t}' for i, t in enumerate(trouble)]
    with kit.Loopback(tmp_path / "home", nodes=3, node_config=names) as federation:
        config = {"rounds": 10, "cohort": 3, "wait-for": 3, "journal": str(journal)}
        done = federation.run(app, config, timeout=900)
        assert done.status == 0 and "raised an exception" not in done.log, done.log
    found = failures(journal)
    assert [(f.round, f.client, f.status) for f in found] == [(r, "client-2", Status.INVALID) for r in range(10)]
    model = load_file(tmp_path / "journal.checkpoints" / "after-000010.safetensors")["model/0"]
    assert model.dtype == np.float64
    np.testing.assert_allclose(model, np.full((2, 3), 10.0))


_FAULTY_SERVER = """
import dataclasses
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from fedcohort.hosts.flower import CohortStrategy
from fedcohort.session.rules import Rules
from fedcohort.selectors import PowerOfChoice, Uniform

app = ServerApp()

class Halving(FedAvg):
    def configure_train(self, server_round, arrays, config, grid):
        config["lr"] = config["lr"] / 2
        return super().configure_train(server_round, arrays, config, grid)

@dataclasses.dataclass(frozen=True, kw_only=True)
class Breaking(Uniform):
    def update(self, state, outcome):
        if outcome.round == 2:
            raise ValueError("broken in update")
        return super().update(state, outcome)

@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    strategy = CohortStrategy(
        "uniform", Halving(), journal=config["journal"], seed=3, cohort_size=config["cohort"],
        wait_for=config["wait-for"], deadline=config["deadline"], patience=900.0,
        shadows={"breaks": Breaking(), "blind": PowerOfChoice()}, rules=Rules(eligible="battery >= 30"),
    )
    arrays = ArrayRecord([np.zeros((2, 3))])
    strategy.start(grid, arrays, config["rounds"], train_config=ConfigRecord({"lr": 1024.0}))
"""
_FAULTY_CLIENT = (
    _CLIENT.replace(
        """        case "hostile":
""",
        """        case "failing":
            raise ValueError("out of memory")
        case "hostile":
""",
    )
    .replace(
        'MetricRecord({"num-examples": 1})', 'MetricRecord({"num-examples": 1, "lr": message.content["config"]["lr"]})'
    )
    .replace('metrics = {"num-examples": 1}', 'metrics = {"num-examples": 1, "lr": 0.0}')
    .replace(
        "app = cohort_client(app)",
        """
@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    trouble = context.node_config.get("trouble")
    numbers = {"num-examples": 0 if trouble else 1, "value": [1.0] if trouble == "hostile" else 1.0}
    return Message(RecordDict({"metrics": MetricRecord(numbers)}), reply_to=message)

def facts(context: Context) -> Facts:
    return Facts(size=10, attributes={"battery": 20 if context.node_config.get("trouble") == "empty" else 80})

app = cohort_client(app, Answers(facts=facts))""",
    )
    .replace("import cohort_client", "import Answers, Facts, cohort_client")
)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_defects_of_every_kind_on_real_processes(kit: Any, tmp_path: Path) -> None:
    """Hostile and failing clients, weights of 0, shadows, a schedule, rules, a killed server; then a finished run."""
    app = kit.flower_app(tmp_path / "app", "faulty", _FAULTY_SERVER, _FAULTY_CLIENT, _CONFIG)
    journal = tmp_path / "journal"
    trouble = ["", "", "hostile", "failing", "empty"]
    names = [f'client-name="client-{i}"' + (f' trouble="{t}"' if t else "") for i, t in enumerate(trouble)]
    config = {"rounds": 11, "cohort": 4, "wait-for": 5, "journal": str(journal)}
    with kit.Loopback(tmp_path / "home", nodes=5, node_config=names) as federation:
        run = federation.start_run(app, config)
        federation.watch(run, lambda: rounds_told(journal) >= 4, 900)
        assert federation.kill_serverapp()
        done = federation.run(app, config, timeout=900)
        assert done.status == 0 and "raised an exception" not in done.log, done.log
        again = federation.run(app, config, timeout=900)
        assert "the run is finished" in again.log, again.log
    account = read_account(journal)
    assert account.done == 11 and account.state == "finished" and account.never == ("client-4",)
    # Who failed, with the reason, in every round that was trained; nothing of it entered the model or changed its type.
    found = failures(journal)
    assert {(f.client, f.status) for f in found} == {("client-2", Status.INVALID), ("client-3", Status.FAILED)}
    assert {f.round for f in found if f.client == "client-2"} == set(range(11))
    assert all("out of memory" in f.reason for f in found if f.client == "client-3")
    model = load_file(tmp_path / "journal.checkpoints" / "after-000011.safetensors")["model/0"]
    assert model.dtype == np.float64
    np.testing.assert_allclose(model, np.full((2, 3), 11.0))
    # The schedule went on over the kill; evaluation is that of those with a weight.
    metrics = read_journal(journal).metrics()
    assert [metrics[r]["train/lr"] for r in range(11)] == [1024.0 / 2 ** (r + 1) for r in range(11)]
    assert all(metrics[r]["evaluate/value"] == 1.0 for r in range(11))
    shadows = {shadow.name: shadow for shadow in account.shadows}
    assert "broken in update" in str(shadows["breaks"].dropped)
    assert shadows["blind"].rounds == 0 and shadows["blind"].note.startswith("lacked its signals")
    assert prove_participation(journal).holds and all(
        "it does not meet battery >= 30" in r.excluded for r in account.rounds
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_superlink_is_killed(kit: Any, tmp_path: Path) -> None:
    """The ServerApp dies with it; nodes find the new one by themselves when it keeps its state in a file."""
    app = small_app(kit, tmp_path / "app")
    journal = tmp_path / "journal"
    config = {"rounds": 5, "cohort": 2, "wait-for": 2, "journal": str(journal)}
    with kit.Loopback(tmp_path / "home", nodes=3, keep_state=True) as federation:
        run = federation.start_run(app, config)
        federation.watch(run, lambda: rounds_told(journal) >= 2, 900)
        federation.kill_superlink()
        federation.start_superlink()
        done = federation.run(app, config, timeout=900)
        assert done.status == 0 and "raised an exception" not in done.log, done.log
    record = read_journal(journal)
    assert Counter(row.round for row in record.cohorts()) == Counter(range(5))
    assert record.table()[0].names == ("partition-0", "partition-1", "partition-2")
    np.testing.assert_allclose(
        load_file(tmp_path / "journal.checkpoints" / "after-000005.safetensors")["model/0"], np.full((2, 3), 5.0)
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_an_operator_looks_after_a_run(kit: Any, tmp_path: Path) -> None:
    """A node dies and is seen to be away; clients are blocked, pinned, paused; the server is killed and seen to be."""
    app = small_app(kit, tmp_path / "app")
    journal = tmp_path / "run.sqlite"
    names = [f'client-name="client-{i}"' for i in range(5)]
    config = {"rounds": 16, "cohort": 2, "wait-for": 3, "journal": str(journal), "deadline": 60.0, "tries": 1000}

    def look() -> RunState:
        with closing(read_journal(journal)) as record:
            return run_state(record)

    def order(*arguments: str) -> None:
        done = CliRunner().invoke(cli, ["journal", "rules", "apply", str(journal), *arguments])
        assert done.exit_code == 0 and "running server" in " ".join(done.output.split()), done.output

    with kit.Loopback(tmp_path / "home", nodes=5, node_config=names) as federation:
        run = federation.start_run(app, config)
        federation.watch(run, lambda: rounds_told(journal) >= 2, 900)
        assert look().state == "running"
        order("--block", "client-0", "--pin", "client-1")
        federation.watch(run, lambda: rounds_told(journal) >= 5, 900)
        order("--unpin", "client-1", "--pause", "client-1=4")
        federation.watch(run, lambda: rounds_told(journal) >= 6, 900)
        federation.kill_node(4)
        federation.watch(run, lambda: "client-4" in ((look().presence or Presence("running", 0.0)).offline), 900)
        assert federation.kill_serverapp()
        federation.watch(run, lambda: look().state == "killed", 900)
        order_while_killed = CliRunner().invoke(cli, ["journal", "rules", "apply", str(journal), "--block", "client-2"])
        assert "when the run is started again" in " ".join(order_while_killed.output.split())
        done = federation.run(app, config, timeout=900)
        assert done.status == 0, done.log
    assert look().state == "finished"
    with closing(read_journal(journal)) as record:
        changes = record.events("rules")
        table, _ = record.table()
        cohorts = [(row.ticket, row.round, set(table.names_of(row.clients))) for row in record.cohorts()]
    assert [body["rules"].get("blocked") for body in changes] == [["client-0"], ["client-0"], ["client-0", "client-2"]]
    first, second, third = (body["ticket"] for body in changes)
    assert 2 <= first < second < third
    assert all("client-0" not in who for ticket, _, who in cohorts if ticket >= first)
    assert all("client-1" in who for ticket, _, who in cohorts if first <= ticket < second)
    until = changes[1]["rules"]["paused"]["client-1"]
    assert all("client-1" not in who for ticket, round_, who in cohorts if ticket >= second and round_ < until)
    assert all("client-2" not in who for ticket, _, who in cohorts if ticket >= third)
    assert prove_participation(journal).kept
