"""The number of cores: what the container and OMP_NUM_THREADS allow, and what other processes leave free."""

import numpy as np
import pytest
import torch

from fedcohort.simulate import cores
from fedcohort.simulate.engine import ClientData, Engine, Jobs, modules
from fedcohort.training.local import LocalTraining


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch):
    monkeypatch.setattr(cores, "_own_cores", lambda: set(range(8)))
    monkeypatch.setattr(cores, "_QUOTAS", ())
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.parametrize(("variable", "expected"), [("3", 3), ("2,4", 2), ("100", 8), ("0", 8), ("many", 8), ("", 8)])
def test_omp_num_threads_is_a_limit(variable, expected, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert cores.usable_cores() == expected


@pytest.mark.parametrize(
    ("quota", "expected"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("-1", 8), ("400000", 4)]
)
def test_a_container_limits_the_cores(quota, expected, tmp_path, monkeypatch):
    """Version 2 has quota and period in one file, version 1 in two; no quota is "max" or -1."""
    (tmp_path / "quota").write_text(f"{quota}\n")
    (tmp_path / "period").write_text("100000\n")
    monkeypatch.setattr(cores, "_QUOTAS", (str(tmp_path / "quota"), str(tmp_path / "missing")))
    monkeypatch.setattr(cores, "_PERIOD", str(tmp_path / "period"))
    assert cores.usable_cores() == expected


@pytest.mark.parametrize(("others", "expected"), [(0.0, 8), (2.9, 5), (8.0, 1), (20.0, 1)])
def test_cores_that_others_use_are_not_free(others, expected, monkeypatch):
    samples = iter([(100.0, 50.0), (110.0, 50.0 + 10 * others)])
    monkeypatch.setattr(cores, "_read_sample", lambda: next(samples))
    monkeypatch.setattr(cores, "_others", cores._Others())
    assert cores.free_cores() == expected


@pytest.mark.parametrize(("workers", "at_once"), [(None, 3), (2, 2)])
def test_each_worker_has_one_thread_of_torch(workers, at_once, monkeypatch):
    """Whatever OMP_NUM_THREADS allows: more threads for one model would change its sums, and wait for each other."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(cores, "_read_sample", lambda: None)
    monkeypatch.setattr(cores, "_others", cores._Others())
    given, pools = [], []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    pool = modules.ThreadPoolExecutor
    monkeypatch.setattr(modules, "ThreadPoolExecutor", lambda count: pools.append(count) or pool(count))
    x, y = np.zeros((8, 3), np.float32), np.array([0, 1] * 4)
    parts = ClientData(np.arange(8), np.array([0, 2, 4, 6, 8]), y, np.zeros(4, np.int64))
    model, local, zeros = "tests.simulate.test_engine:Residual", LocalTraining(steps=1), np.zeros(4, np.int64)
    with Engine(
        x, y, x, y, classes=2, federations=[parts], model=model, local=local, device="cpu", workers=workers
    ) as engine:
        engine.train(engine.init(0)[None], Jobs(zeros, zeros, np.arange(4), zeros, zeros))
    assert given == [1, 8] and pools == [at_once]
