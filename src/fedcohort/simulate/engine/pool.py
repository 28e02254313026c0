"""Worker processes that share the engine's data and take part in each call.

A worker is a fresh interpreter (nothing is forked, no ``__main__`` is imported again). Data, models and results lie in
memory that both sides map; only a short JSON message per call and worker goes through a socket. A worker ends when its
socket does, so it never outlives its parent; a worker that dies is an error that says so.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass

import torch

from fedcohort.simulate.engine.memory import DTYPES, SharedBlock
from fedcohort.simulate.engine.store import Store
from fedcohort.simulate.engine.tasks import Work
from fedcohort.simulate.engine.types import WorkerError
from fedcohort.simulate.local import LocalTraining

_LENGTH = 8  # bytes in front of a message that give its length
_WORKER = "from fedcohort.simulate.engine.worker import main; main()"
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Arena:
    """Shared tensors by name; a block grows when a larger tensor of its name is asked for."""

    def __init__(self) -> None:
        self.blocks: dict[str, SharedBlock] = {}
        self.generation: dict[str, int] = {}

    def tensor(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor in the block ``name``, whatever was there before."""
        size = dtype.itemsize
        for side in shape:
            size *= side
        block = self.blocks.get(name)
        if block is None or block.size < size:
            block = SharedBlock(size + size // 4)
            self.blocks[name] = block
            self.generation[name] = self.generation.get(name, 0) + 1
        return block.tensor(dtype, shape)


def send(channel: socket.socket, message: dict[str, object], fds: list[int] | None = None) -> None:
    """Send one message, with open files."""
    data = json.dumps(message).encode()
    head = len(data).to_bytes(_LENGTH, "little")
    if fds:
        socket.send_fds(channel, [head], fds)
        channel.sendall(data)
    else:
        channel.sendall(head + data)


def receive(channel: socket.socket) -> tuple[dict[str, object], list[int]]:
    """Wait for one message and its open files; :class:`EOFError` when the other side is gone."""
    head, fds, _, _ = socket.recv_fds(channel, _LENGTH, 64)
    while len(head) < _LENGTH:
        more = channel.recv(_LENGTH - len(head)) if head else b""
        if not more:
            raise EOFError("the other process has closed its socket")
        head += more
    length = int.from_bytes(head, "little")
    data = bytearray()
    while len(data) < length:
        more = channel.recv(min(length - len(data), 2**20))
        if not more:
            raise EOFError("the other process has closed its socket")
        data += more
    result: dict[str, object] = json.loads(data.decode())
    return result, list(fds)


@dataclass(frozen=True)
class Recipe:
    """From which a worker builds the parent's program."""

    model: str
    sample: tuple[int, ...]
    classes: int
    local: LocalTraining


class _Worker:
    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket) -> None:
        self.process = process
        self.channel = channel
        self.known: dict[str, int] = {}  # generation of each block it has mapped
        self.ready = False


class Pool:
    """``count`` worker processes beside the calling one.

    Parameters
    ----------
    count : int
        Worker processes to start; the caller is one more.
    store : Store
        The data, in shared memory.
    recipe : Recipe
        From which a worker builds the same program.
    arena : Arena
        Where the tensors of every call will lie.
    """

    def __init__(self, count: int, store: Store, recipe: Recipe, arena: Arena) -> None:
        self.arena = arena
        self.workers: list[_Worker] = []
        hello: dict[str, object] = {
            **asdict(recipe),
            "shape": asdict(store.shape),
            "sizes": [block.size for block in store.blocks],
            "path": sys.path,
        }
        for _ in range(count):
            mine, theirs = socket.socketpair()
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-c", _WORKER, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
                )
            worker = _Worker(process, mine)
            self.workers.append(worker)
            send(mine, hello, [block.fd for block in store.blocks])

    def ready(self, wait: bool = False) -> bool:
        """Whether every worker has started; with ``wait``, block until it has or died."""
        for worker in self.workers:
            if not worker.ready:
                if not wait and not _readable(worker.channel):
                    return False
                self._answer(worker)
                worker.ready = True
        return True

    def start(self, work: Work, claims: torch.Tensor) -> None:
        """Tell every worker to begin; all tensors must come from the arena."""
        described = {}
        blocks = {}
        for name, tensor in (*work.tensors.items(), ("claims", claims)):
            block = work.blocks.get(name, name)
            described[name] = [_NAMES[tensor.dtype], list(tensor.shape), block]
            blocks[block] = self.arena.generation[block]
        for position, worker in enumerate(self.workers, start=1):
            fresh = [name for name, generation in blocks.items() if worker.known.get(name) != generation]
            message: dict[str, object] = {
                "kind": work.kind,
                "units": work.units,
                "numbers": work.numbers,
                "tensors": described,
                "fresh": [[name, self.arena.blocks[name].size] for name in fresh],
                "start": position * work.units // (len(self.workers) + 1),
            }
            worker.known.update((name, blocks[name]) for name in fresh)
            try:
                send(worker.channel, message, [self.arena.blocks[name].fd for name in fresh])
            except OSError:
                raise self._death(worker) from None

    def finish(self) -> None:
        """Wait until every worker has nothing left to do."""
        with selectors.DefaultSelector() as selector:
            for worker in self.workers:
                selector.register(worker.channel, selectors.EVENT_READ, worker)
            waiting = len(self.workers)
            while waiting:
                for key, _ in selector.select():
                    self._answer(key.data)
                    selector.unregister(key.fileobj)
                    waiting -= 1

    def _answer(self, worker: _Worker) -> None:
        try:
            message, _ = receive(worker.channel)
        except (EOFError, OSError):
            raise self._death(worker) from None
        if "error" in message:
            raise WorkerError(
                f"The worker process {worker.process.pid} of the training engine failed:\n{message['error']}",
                hint="build the engine with workers=1 to see the error where it happens",
            )

    @staticmethod
    def _death(worker: _Worker) -> WorkerError:
        try:
            code: int | None = worker.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            code = None
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return WorkerError(
            f"The worker process {worker.process.pid} of the training engine died in mid-work ({how}).",
            hint="signal 9 usually means that memory ran out; use fewer workers (workers=1 needs no other process)",
        )

    def close(self) -> None:
        """End the workers."""
        for worker in self.workers:
            worker.channel.close()
        for worker in self.workers:
            try:
                worker.process.wait(timeout=2)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
        self.workers = []


def _readable(channel: socket.socket) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        return bool(selector.select(timeout=0))
