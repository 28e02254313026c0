"""Every command of docs/flower.md and docs/operators.md, as printed, on a federation of real processes."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from fedcohort.core.protocol import Status
from fedcohort.journal import is_blank, read_journal

from .loopback import Service, free_ports
from .test_deployment import certificates, node_key

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
DOCS = Path(__file__).parents[3] / "docs"
SERVICES = ("flower-superlink", "flower-supernode")


def commands(page: str, heading: str = "") -> list[str]:
    """Return the commands of a page, or of one of its sections, in order."""
    text = (DOCS / page).read_text(encoding="utf-8")
    if heading:
        text = re.split(r"^## ", text.split(f"## {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    lines = re.findall(r"^ {0,4}(?:\$ )?((?:fedcohort|flwr|flower-\w+) .*)$", text, re.MULTILINE)
    return [line.split("  #")[0].strip() for line in lines]


def connections(home: Path, **replaced: str) -> None:
    """Write the connections that the page shows into Flower's configuration."""
    blocks = re.findall(r"^    (\[superlink\..*\n(?:    \S.*\n)+)", (DOCS / "flower.md").read_text(), re.MULTILINE)
    text = "\n".join(line.strip() for block in blocks for line in block.splitlines())
    for found, mine in replaced.items():
        text = text.replace(found, mine)
    (home / ".flwr").mkdir(exist_ok=True)
    (home / ".flwr" / "config.toml").write_text(text + "\n")
    assert text.count("[superlink.") == 2


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Any]:
    """A terminal in a folder that is also the user's home; services that were started are ended."""
    scripts = str(Path(sys.executable).parent)
    env = {
        **os.environ,
        "HOME": str(tmp_path),
        "FLWR_HOME": str(tmp_path / ".flwr"),
        "PATH": os.pathsep.join([scripts, os.environ["PATH"]]),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
        "PYTHONUNBUFFERED": "1",
    }

    class Machine:
        home = tmp_path

        def call(self, line: str, seconds: float = 900) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                shlex.split(line), cwd=tmp_path, env=env, capture_output=True, text=True, timeout=seconds, check=False
            )

        def start(self, line: str) -> Service:
            number = len(list(tmp_path.glob("service-*.log")))
            service = Service(shlex.split(line), env, tmp_path, tmp_path / f"service-{number}.log")
            ending.callback(lambda: service.kill() if service.alive else None)
            return service

        def until(self, found: Any, seconds: float = 300) -> None:
            end = time.monotonic() + seconds
            while not found():
                assert time.monotonic() < end, "\n".join(p.read_text()[-2000:] for p in tmp_path.glob("service-*.log"))
                time.sleep(0.2)

    with ExitStack() as ending:
        yield Machine()


def test_trying_it_on_one_machine(machine: Any) -> None:
    connections(machine.home)
    (new,) = [line for line in commands("flower.md") if line.startswith("fedcohort flower new")][:1]
    assert machine.call(new).returncode == 0
    for line in commands("flower.md", "Trying it on one machine"):
        if line.startswith(SERVICES):
            service = machine.start(line)
            if "superlink " in line and "--superlink" not in line:
                machine.until(lambda: "8000" in service.log_file.read_text())  # noqa: B023
        else:
            done = machine.call(line)
            assert done.returncode == 0 and "raised an exception" not in done.stdout, done.stdout[-4000:] + done.stderr
    (journal,) = (machine.home / ".fedcohort" / "my-app").glob("*.sqlite")
    with closing(read_journal(journal)) as record:
        assert {"clinic-1", "clinic-2"} == set(record.table()[0].names)
        assert {reply.status for reply in record.replies()} == {Status.OK}
        assert record.events("ended")[-1]["state"] == "finished"


def test_tls_and_node_authentication(machine: Any) -> None:
    certificates(machine.home)  # ca.crt, server.pem and server.key
    node_key(machine.home, "clinic-north")
    connections(machine.home, **{"/home/me/keys": str(machine.home)})
    superlink, register, supernode = commands("flower.md", "TLS and node authentication")
    link = machine.start(superlink)
    machine.until(lambda: "8000" in link.log_file.read_text())
    assert machine.call(register).returncode == 0
    machine.start(supernode)
    machine.until(lambda: '"status": "online"' in machine.call("flwr supernode list secure --format json").stdout)


# -- docs/operators.md ------------------------------------------------------------------------------------------------

_SERVER = """
import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from fedcohort.hosts import Policy
from fedcohort.hosts.flower import CohortStrategy

app = ServerApp()

@app.main()
def main(grid: Grid, context: Context) -> None:
    strategy = CohortStrategy(
        "power-of-choice", strategy=FedAvg(fraction_evaluate=0.0), journal=context.run_config["journal"], seed=3,
        policy=Policy(size=2, wait_for=4, deadline=900.0, patience=900.0), shadows={"fedcor": "uniform"},
    )
    strategy.start(grid, ArrayRecord([np.zeros((2, 3))]), num_rounds=1000)
"""
_CLIENT = """
import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from fedcohort.hosts.flower import Answers, Facts, cohort_client

app = ClientApp()

@app.train()
def train(message: Message, context: Context) -> Message:
    (value,) = message.content["arrays"].to_numpy_ndarrays()
    reply = {"arrays": ArrayRecord([value + 1]), "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(reply), reply_to=message)

app = cohort_client(app, Answers(lambda context: Facts(size=10, label_counts=[5, 5]), lambda *_: {"loss": 1.0}))
"""
_STOPPED = ("abandon", "selector", "prune", "forget")  # the commands that need a stopped run


def test_every_command_for_operators_on_a_live_run(kit: Any, machine: Any, tmp_path: Path) -> None:
    journal = machine.home / "run.sqlite"
    app = kit.flower_app(tmp_path / "app", "small", _SERVER, _CLIENT, {"journal": str(journal)})
    names = [f'client-name="clinic-{letter}"' for letter in "abcd"]
    lines = commands("operators.md")
    assert len(lines) >= 12
    later = [line for line in lines if line.split()[1:2] == ["journal"] and line.split()[2] in _STOPPED]

    def rounds() -> int:
        if is_blank(journal):
            return 0
        with closing(read_journal(journal)) as record:
            return max(record.last()[0], 0)

    with kit.Loopback(tmp_path / "federation", nodes=4, node_config=names) as federation:
        run = federation.start_run(app, {"journal": str(journal)})
        federation.watch(run, lambda: rounds() >= 14, 900)
        for line in lines:
            if line in later:
                refused = machine.call(line)
                assert refused.returncode != 0 and "use by another process" in refused.stderr, (line, refused.stderr)
                continue
            if line.split()[1] == "dashboard":
                port = free_ports(1)[0]
                service = machine.start(f"{line} --port {port}")
                machine.until(lambda: str(port) in service.log_file.read_text())  # noqa: B023
                continue
            done = machine.call(line)
            assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}{done.stderr}"
            assert run.alive
        before = rounds()
        federation.watch(run, lambda: rounds() > before + 2, 900)
        assert federation.kill_serverapp()
    with closing(read_journal(journal)) as record:
        assert any("clinic-c" in body["rules"].get("blocked", ()) for body in record.events("rules"))
    for line in later:
        done = machine.call(line)
        assert done.returncode == 0 or ("abandon" in line and "no cohort" in done.stderr.lower()), (line, done.stderr)
    done = machine.call("fedcohort journal verify run.sqlite")
    assert done.returncode == 0, done.stdout
