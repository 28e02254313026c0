"""Worker processes: same numbers, clear errors, nobody left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import torch

from fedcohort.simulate.engine import ClientData, Engine, Jobs, WorkerError
from fedcohort.simulate.engine.library import compiled
from fedcohort.simulate.engine.memory import SharedBlock
from fedcohort.simulate.local import LocalTraining


@pytest.fixture(autouse=True)
def no_machine_code(monkeypatch):
    """Where there is a compiler, threads do the work."""
    compiled.cache_clear()
    monkeypatch.setenv("FEDCOHORT_CC", "")
    yield
    compiled.cache_clear()


@pytest.fixture
def engine(no_machine_code):
    generator = np.random.default_rng(0)
    x = generator.integers(0, 256, (300, 8, 8), dtype=np.uint8)
    y = generator.integers(0, 4, 300)
    clients = ClientData(np.arange(300), np.arange(0, 301, 30), y, np.zeros(10, np.int64))
    local = LocalTraining(epochs=2, batch_size=8, lr=0.1)
    with Engine(
        x, y, x, y, classes=4, federations=[clients], model="mlp", local=local, device="cpu", workers=3
    ) as engine:
        yield engine


def every_client():
    """Every client under four seeds: enough jobs for every process to have some."""
    zeros = np.zeros(40, np.int64)
    return Jobs(zeros, zeros, np.arange(40) % 10, zeros, np.arange(40) // 10)


def workers_of(engine):
    return [worker.process for worker in engine._backend._pool.workers]


def gone(pid, patience=20.0):
    end = time.monotonic() + patience
    while time.monotonic() < end:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def test_larger_and_smaller_calls_share_the_pool(engine):
    model = engine.init(0)[None]
    first = engine.train(model, every_client())
    many = engine.train(first.params, Jobs(*(np.arange(10) * k for k in (4, 0, 1, 0, 0))))
    again = engine.train(model, every_client())
    assert many.params.shape == (10, engine.n_params)
    assert torch.equal(first.params, again.params)
    assert len(workers_of(engine)) == 2


def test_a_killed_worker_is_a_clear_error_and_the_next_call_works(engine):
    model = engine.init(0)[None]
    want = engine.train(model, every_client()).params
    victim = workers_of(engine)[0]
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    with pytest.raises(WorkerError, match=r"died in mid-work \(signal 9\)"):
        engine.train(model, every_client())
    assert torch.equal(engine.train(model, every_client()).params, want)


def test_workers_end_with_the_engine(engine):
    engine.train(engine.init(0)[None], every_client())
    processes = workers_of(engine)
    engine.close()
    assert all(process.poll() is not None for process in processes)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_workers_die_with_a_killed_parent():
    script = """
        import numpy as np, sys, time
        from fedcohort.simulate.engine import ClientData, Engine, Jobs
        from fedcohort.simulate.local import LocalTraining
        x = np.zeros((20, 4), np.float32); y = np.arange(20) % 2; zeros = np.zeros(2, np.int64)
        clients = ClientData(np.arange(20), np.array([0, 10, 20]), y, zeros)
        engine = Engine(x, y, x, y, classes=2, federations=[clients], model="logistic",
                        local=LocalTraining(steps=1, batch_size=2), device="cpu", workers=2)
        engine.evaluate(engine.init(0)[None]); engine._backend._pool.ready(wait=True)
        print(engine._backend._pool.workers[0].process.pid, flush=True)
        time.sleep(60)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert gone(child)


def test_small_work_starts_no_workers():
    x, y = np.zeros((20, 4), np.float32), np.arange(20) % 2
    clients = ClientData(np.arange(20), np.array([0, 10, 20]), y, np.zeros(2, np.int64))
    local = LocalTraining(steps=1, batch_size=2)
    with Engine(x, y, x, y, classes=2, federations=[clients], model="logistic", local=local, device="cpu") as engine:
        zeros = np.zeros(2, np.int64)
        engine.train(engine.init(0)[None], Jobs(zeros, zeros, np.arange(2), zeros, zeros))
        assert engine._backend._pool is None


def test_shared_memory_is_shared_and_freed():
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    block = SharedBlock(64)
    other = SharedBlock(64, os.dup(block.fd))
    block.tensor(torch.float32, (4, 2))[1, 1] = 7.0
    assert other.array("float32", (4, 2))[1, 1] == 7.0
    view = block.tensor(torch.int64, (3,))
    del block, other
    view.fill_(5)  # the memory lives as long as somebody looks at it
    assert view.tolist() == [5, 5, 5]
    del view
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_block_knows_whether_anybody_looks_at_it():
    block = SharedBlock(64)
    assert not block.in_use
    row = block.tensor(torch.float32, (4, 4))[1]  # a view of a view
    assert block.in_use
    del row
    assert not block.in_use
    seen = block.array("float32", (2,))[1:]
    assert block.in_use
    del seen
    assert not block.in_use


def test_results_that_are_kept_are_not_written_over(engine):
    models = engine.init(0)[None]
    first = engine.train(models, every_client()).params
    copy, kept = first.clone(), first[2]
    del first
    second = engine.train(models + 1, every_client()).params
    assert torch.equal(kept, copy[2])
    assert not torch.equal(second[2], kept)
    del kept, second
    engine.train(models, every_client())
    engine.train(models, every_client())
    assert sum(name.startswith("out-") for name in engine._backend._arena.blocks) == 2  # used again, not piled up
