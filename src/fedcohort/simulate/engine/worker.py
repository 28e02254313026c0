"""A worker process of the training engine: maps the parent's memory and does units of work until the socket closes."""

from __future__ import annotations

import gc
import signal
import socket
import sys
import traceback
from typing import Any

import torch

from fedcohort.simulate.engine.memory import DTYPES, SharedBlock
from fedcohort.simulate.engine.pool import receive, send
from fedcohort.simulate.engine.store import Store, StoreShape
from fedcohort.simulate.engine.tasks import Executor, Work, choose_program
from fedcohort.simulate.local import LocalTraining
from fedcohort.simulate.models import build_model


def main() -> None:
    """Serve the parent whose socket is the file descriptor named in the first argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which closes the socket
    torch.set_num_threads(1)
    channel = socket.socket(fileno=int(sys.argv[1]))
    try:
        serve(channel)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def serve(channel: socket.socket) -> None:
    """Greet the parent, then work through its messages."""
    hello: Any
    message: Any
    hello, fds = receive(channel)
    try:
        executor = _executor(hello, fds)
    except Exception:
        send(channel, {"error": traceback.format_exc()})
        return
    gc.freeze()  # what start-up has left is never garbage: collections need not look at it again and again
    send(channel, {"ready": True})
    blocks: dict[str, SharedBlock] = {}
    while True:
        message, fds = receive(channel)
        for (name, size), fd in zip(message["fresh"], fds, strict=True):
            blocks[name] = SharedBlock(size, fd)
        try:
            tensors = {
                name: blocks[block].tensor(DTYPES[dtype], tuple(shape))
                for name, (dtype, shape, block) in message["tensors"].items()
            }
            claims = tensors.pop("claims")
            work = Work(message["kind"], message["units"], tensors, message["numbers"])
            executor.run(work, claims, message["start"])
        except Exception:
            send(channel, {"error": traceback.format_exc()})
        else:
            send(channel, {"done": True})


def _executor(hello: Any, fds: list[int]) -> Executor:
    sys.path[:] = hello["path"]
    shape = hello["shape"]
    store = Store(
        StoreShape(**{**shape, "clients": tuple(shape["clients"])}),
        [SharedBlock(size, fd) for size, fd in zip(hello["sizes"], fds, strict=True)],
    )
    sample = tuple(hello["sample"])
    module = build_model(hello["model"], sample, hello["classes"])
    return Executor(store, choose_program(module, sample, LocalTraining(**hello["local"])))
