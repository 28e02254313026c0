"""Absurd sizes get a clear error, and nothing is allocated for them."""

import pytest

from fedcohort.core.errors import FedcohortError
from fedcohort.simulate import memory_check
from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.runner import Simulation

TABLE = {
    "seeds": [0],
    "data": {"name": "synthetic", "samples": 200, "test_samples": 60, "classes": 3, "shape": [5]},
    "scenario": {"partition": {"name": "shards", "clients": 8, "per_client": 2}},
    "model": {"name": "logistic"},
    "local": {"steps": 2, "batch_size": 8},
    "run": {"rounds": 2, "cohort": 2, "workers": 1, "device": "cpu"},
    "selectors": {"uniform": {}},
}
LARGE = (10**13, 10**19, 10**400)
KEYS = """
    run.cohort run.workers run.rounds data.samples data.test_samples data.classes data.modes local.steps local.epochs
    local.batch_size seeds scenario.partition.clients scenario.partition.per_client scenario.server_validation
"""
CASES = [
    *((key, value) for key in KEYS.split() for value in LARGE),
    ("run.rounds", 10**9),
    *(("data.shape", value) for value in ([10**13], [10**7, 10**7], [3] * 40)),
]


@pytest.mark.parametrize(("key", "value"), CASES, ids=[f"{key}-{str(value)[:12]}" for key, value in CASES])
def test_absurd_sizes_are_refused_with_a_clear_error(tmp_path, key, value):
    table = {name: dict(part) if isinstance(part, dict) else part for name, part in TABLE.items()}
    table["scenario"] = {"partition": dict(TABLE["scenario"]["partition"])}
    *path, last = key.split(".")
    section = table
    for name in path:
        section = section[name]
    if last == "epochs":
        del section["steps"]
    section[last] = value
    with pytest.raises(FedcohortError) as refused:
        Simulation(Experiment.from_dict(table), tmp_path / "x")
    assert len(str(refused.value)) < 600
    assert not (tmp_path / "x").exists()


def test_errors_of_the_allocators_become_clear_errors():
    with (
        pytest.raises(FedcohortError, match=r"not enough memory: Unable to allocate(.|\n)*lockstep"),
        memory_check.memory_errors(),
    ):
        raise MemoryError("Unable to allocate 7 GiB")
    with pytest.raises(FedcohortError, match="not enough memory: can't allocate"), memory_check.memory_errors():
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")
    with pytest.raises(RuntimeError, match="something else"), memory_check.memory_errors():
        raise RuntimeError("something else")
