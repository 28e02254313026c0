"""A whole Flower deployment on this machine: one SuperLink, some SuperNodes, real processes, real ports.

Every process gets a Flower home of its own. Telemetry, the update check and the installation of dependencies are off,
and leaving the ``with`` block ends everything that was started::

    with Loopback("home", nodes=3) as federation:
        print(federation.run("my-app", timeout=120).log)
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from fedcohort.core.errors import FedcohortError, InputError

log = logging.getLogger(__name__)
_CONNECTION = "loop"
_POLL = 0.1


class LoopbackError(FedcohortError, RuntimeError):
    """A process of the deployment did not start, ended too early or did not finish in time."""


@dataclass(frozen=True)
class Certificates:
    """PEM files for TLS: the certificate authority, and the SuperLink's certificate and key."""

    authority: Path
    certificate: Path
    key: Path


@dataclass(frozen=True)
class FinishedRun:
    """A finished ``flwr run``: its exit status and everything it printed, the ServerApp's log included."""

    status: int
    log: str


def free_ports(count: int) -> list[int]:
    """Return ``count`` different TCP ports of the loopback address that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [int(s.getsockname()[1]) for s in sockets]
    finally:
        for s in sockets:
            s.close()


def _processes() -> dict[int, tuple[int, str]]:
    """Return every process as pid -> (parent's pid, command line)."""
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,command="], capture_output=True, text=True, check=True)
    table: dict[int, tuple[int, str]] = {}
    for line in listing.stdout.splitlines():
        pid, parent, command = line.split(None, 2) if len(line.split(None, 2)) == 3 else (*line.split(), "")
        table[int(pid)] = (int(parent), command)
    return table


def descendants(pid: int) -> dict[int, str]:
    """Return the process ``pid`` and everything below it as pid -> command line."""
    table = _processes()
    found = {pid: table[pid][1]} if pid in table else {}
    grown = True
    while grown:
        below = {p: c for p, (parent, c) in table.items() if parent in found and p not in found}
        found.update(below)
        grown = bool(below)
    return found


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


class Service:
    """One long-running command with its log file."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], cwd: Path, log_file: Path) -> None:
        self.command = list(command)
        self.log_file = log_file
        self._stream: IO[bytes] = log_file.open("ab")
        self.process = subprocess.Popen(
            self.command,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=self._stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def alive(self) -> bool:
        """Whether the command runs."""
        return self.process.poll() is None

    def kill(self) -> None:
        """End the command and everything it started, at once, as a power cut would."""
        # First, because the children cannot be found once their parent is gone.
        _kill(list(descendants(self.process.pid)))
        self.process.wait(10)
        self._stream.close()

    def tail(self, lines: int = 60) -> str:
        """Return the last lines of its log."""
        return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-lines:])


class Loopback:
    """A deployment on the loopback address.

    Parameters
    ----------
    home : path
        A folder for Flower homes, logs and configuration; made when missing.
    nodes : int
        How many SuperNodes; node i gets ``partition-id=i num-partitions=nodes`` in its node config.
    node_config : sequence of str, optional
        One more piece of node config for each node, for example ``'client-name="north"'``.
    env : mapping, optional
        More environment variables for every process.
    certificates : Certificates, optional
        Serve and connect with TLS; default is plain HTTP.
    node_keys : sequence of path, optional
        Private keys, one per node, for node authentication. The public key lies beside it with the suffix ``.pub``.
    node_names : sequence of str or None, optional
        With ``node_keys``, the name each key is registered under with the SuperLink; None leaves a node unregistered,
        so that it is turned away. Default: ``node-0``, ``node-1``, ...
    simulated : int
        So many more nodes are simulated by Flower inside the SuperLink (needs Ray); then ``nodes`` is 0.
    keep_state : bool
        Whether the SuperLink keeps its state in a file, so that it survives a restart.
    """

    def __init__(
        self,
        home: str | Path,
        nodes: int,
        *,
        node_config: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        certificates: Certificates | None = None,
        node_keys: Sequence[Path] | None = None,
        node_names: Sequence[str | None] | None = None,
        simulated: int = 0,
        keep_state: bool = False,
    ) -> None:
        if simulated and nodes:
            raise InputError(f"Nodes are either real or simulated. Got nodes={nodes} and simulated={simulated}.")
        for name, values in (("node_config", node_config), ("node_keys", node_keys), ("node_names", node_names)):
            if values is not None and len(values) != nodes:
                raise InputError(f"{name} must have one entry per node ({nodes}). Got {len(values)}.")
        self.home = Path(home).resolve()
        self.nodes = nodes
        self.node_config = node_config
        self.certificates = certificates
        self.node_keys = node_keys
        self.node_names = [f"node-{i}" for i in range(nodes)] if node_names is None else list(node_names)
        self.simulated = simulated
        self.keep_state = keep_state
        self._ports = free_ports(nodes + 1)
        self._superlink: Service | None = None
        self._supernodes: dict[int, Service] = {}
        self._runs: list[Service] = []
        scripts = str(Path(sys.executable).parent)
        self._env = {
            **os.environ,
            # Flower starts its helpers by name, so the environment's scripts come first.
            "PATH": os.pathsep.join([scripts, os.environ.get("PATH", "")]),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
            "NO_COLOR": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            **(env or {}),
        }

    @property
    def address(self) -> str:
        """Host and port of the SuperLink."""
        return f"127.0.0.1:{self._ports[0]}"

    def _home_of(self, who: str) -> dict[str, str]:
        folder = self.home / who
        folder.mkdir(parents=True, exist_ok=True)
        return {**self._env, "FLWR_HOME": str(folder)}

    def _script(self, name: str) -> str:
        found = shutil.which(name, path=self._env["PATH"])
        if found is None:
            raise LoopbackError(
                f"The command {name!r} is not installed beside {sys.executable}.",
                hint="install fedcohort with its 'flower' extra",
            )
        return found

    def __enter__(self) -> Loopback:
        try:
            self.home.mkdir(parents=True, exist_ok=True)
            lines = [f"[superlink.{_CONNECTION}]", f"address = {json.dumps(self.address)}"]
            if self.certificates is None:
                lines.append("insecure = true")
            else:
                lines.append(f"root-certificates = {json.dumps(str(self.certificates.authority))}")
            (self.home / "cli").mkdir(exist_ok=True)
            (self.home / "cli" / "config.toml").write_text("\n".join(lines) + "\n")
            self.start_superlink()
            for node in range(self.nodes):
                self.start_node(node)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if error is not None:
            error.add_note(self.logs())

    def start_superlink(self, *, timeout: float = 900) -> None:
        """Start the SuperLink and wait until it accepts connections."""
        command = [self._script("flower-superlink"), "--host", "127.0.0.1", "--port", str(self._ports[0])]
        if self.certificates is None:
            command.append("--insecure")
        else:
            command += ["--ssl-ca-certfile", str(self.certificates.authority)]
            command += ["--ssl-certfile", str(self.certificates.certificate)]
            command += ["--ssl-keyfile", str(self.certificates.key)]
        if self.node_keys is not None:
            command.append("--enable-supernode-auth")
        if self.simulated:
            command.append("--simulation")
        if self.keep_state:
            command += ["--database", str(self.home / "superlink.db")]
        self._superlink = Service(command, self._home_of("superlink"), self.home, self.home / "superlink.log")
        self._wait_for_port(self._superlink, self._ports[0], timeout)
        if self.node_keys is not None:
            for name, key in zip(self.node_names, self.node_keys, strict=True):
                if name is not None:
                    self.cli("supernode", "register", f"{key}.pub", _CONNECTION, "--name", name)

    def kill_superlink(self) -> None:
        """Cut the SuperLink and its ServerApps off."""
        if self._superlink is not None:
            self._superlink.kill()
            self._superlink = None

    def start_node(self, node: int) -> None:
        """Start SuperNode ``node``; it registers by itself, with a new node id each time."""
        if node in self._supernodes and self._supernodes[node].alive:
            raise LoopbackError(f"SuperNode {node} runs already.")
        config = f"partition-id={node} num-partitions={self.nodes}"
        if self.node_config is not None:
            config = f"{config} {self.node_config[node]}".strip()
        command = [self._script("flower-supernode"), "--superlink", self.address, "--node-config", config]
        command += ["--host", "127.0.0.1", "--port", str(self._ports[1 + node])]
        if self.certificates is None:
            command.append("--insecure")
        else:
            command += ["--root-certificates", str(self.certificates.authority)]
        if self.node_keys is not None:
            command += ["--auth-supernode-private-key", str(self.node_keys[node])]
        self._supernodes[node] = Service(
            command, self._home_of(f"node-{node}"), self.home, self.home / f"node-{node}.log"
        )

    def kill_node(self, node: int) -> None:
        """Cut SuperNode ``node`` off, with whatever it is training."""
        service = self._supernodes.pop(node, None)
        if service is not None:
            service.kill()

    def kill_serverapp(self) -> bool:
        """Cut the running ServerApp off; return whether there was one."""
        if self._superlink is None:
            return False
        found = [p for p, command in descendants(self._superlink.process.pid).items() if "flwr-serverapp" in command]
        _kill(found)
        for run in self._runs:
            if run.alive:
                run.kill()  # its stream would keep waiting for the log
        return bool(found)

    def cli(self, *arguments: str, timeout: float = 900) -> str:
        """Run one ``flwr`` command to its end and return what it printed."""
        done = subprocess.run(
            [self._script("flwr"), *arguments],
            env=self._home_of("cli"),
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if done.returncode != 0:
            raise LoopbackError(f"'flwr {' '.join(arguments)}' failed:\n{done.stdout}{done.stderr}")
        return done.stdout

    def start_run(self, app: str | Path, config: Mapping[str, str | int | float | bool] | None = None) -> Service:
        """Submit ``app`` with run config ``config`` and return the streaming ``flwr run`` process."""
        command = [self._script("flwr"), "run", str(Path(app).resolve()), _CONNECTION, "--stream"]
        if config:
            pairs = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
            command += ["--run-config", pairs]
        if self.simulated:
            command += ["--federation-config", f"num-supernodes={self.simulated} client-resources-num-cpus=1"]
        run = Service(command, self._home_of("cli"), self.home, self.home / f"run-{len(self._runs)}.log")
        self._runs.append(run)
        return run

    def run(
        self,
        app: str | Path,
        config: Mapping[str, str | int | float | bool] | None = None,
        *,
        timeout: float = 300,
    ) -> FinishedRun:
        """Submit ``app`` and wait until its ServerApp has finished; a long silence is an error."""
        return self.wait(self.start_run(app, config), timeout)

    def wait(self, run: Service, timeout: float) -> FinishedRun:
        """Wait until a run started with :meth:`start_run` has finished."""
        self.watch(run, lambda: not run.alive, timeout)
        return FinishedRun(run.process.wait(), run.log_file.read_text(errors="replace"))

    def watch(self, run: Service, until: Callable[[], bool], timeout: float) -> None:
        """Wait until ``until()`` holds, as long as the run keeps logging, because a busy machine may be slow.

        ``timeout`` seconds without a new line in its log, or the end of the run before that, are an error.
        """
        said, since = -1, time.monotonic()
        while not until():
            now, size = time.monotonic(), run.log_file.stat().st_size
            if size != said:
                said, since = size, now
            elif not run.alive:
                raise LoopbackError(f"The run ended with {run.process.returncode} before that.\n{run.tail()}")
            elif now - since > timeout:
                tail = run.tail()
                run.kill()
                raise LoopbackError(f"The run has said nothing for {timeout:g} s.\n{tail}")
            time.sleep(5 * _POLL)

    def logs(self, lines: int = 60) -> str:
        """Return the last lines of every process's log."""
        parts = []
        for file in sorted(self.home.glob("*.log")):
            tail = "\n".join(file.read_text(errors="replace").splitlines()[-lines:])
            parts.append(f"----- {file.name}\n{tail}")
        return "\n".join(parts)

    def close(self) -> None:
        """End everything that was started."""
        for service in [*self._runs, *self._supernodes.values(), *([self._superlink] if self._superlink else [])]:
            if service.alive:
                service.kill()
        self._supernodes.clear()
        self._superlink = None

    def _wait_for_port(self, service: Service, port: int, timeout: float) -> None:
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if not service.alive:
                break
            with socket.socket() as probe:
                probe.settimeout(1)
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(_POLL)
        raise LoopbackError(f"The SuperLink did not listen on port {port} within {timeout:g} s.\n{service.tail()}")
