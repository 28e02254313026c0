"""``fedcohort doctor`` says what trains, and why it is slow, on this machine or a worse one."""

import json

import pytest
from typer.testing import CliRunner

from fedcohort.cli.app import app
from fedcohort.simulate import cores
from fedcohort.simulate.engine import library


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(cores, "_own_cores", lambda: set(range(4)))
    monkeypatch.setattr(cores, "_QUOTAS", ())
    monkeypatch.setattr(cores._Others, "busy_cores", lambda self: 0.0)
    library.load_compiled.cache_clear()
    yield
    library.load_compiled.cache_clear()


def facts(*arguments):
    done = CliRunner().invoke(app, ["doctor", "--device", "cpu", "--format", "json", *arguments])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_ten_lines_say_what_is_used():
    done = CliRunner().invoke(app, ["doctor", "--device", "cpu"], env={"COLUMNS": "500"})
    lines = done.stdout.splitlines()
    assert done.exit_code == 0 and len(lines) <= 11
    said = facts()
    assert said["mlp"] == said["lenet"] == "compiled code on cpu"
    assert said["vgg11-bn"].startswith("plain loop on cpu: ") and "vgg11-bn" in said["slow"]
    assert "clients train 4 at a time" in said["cores"] and "torch 2" in said["fedcohort"]


@pytest.mark.parametrize(
    ("variable", "busy", "slow", "at_once"),
    [("2", 0.0, "OMP_NUM_THREADS=2", 2), ("", 2.9, "other processes", 1), ("", 0.0, None, 4)],
)
def test_cores_that_may_not_be_used_are_named(variable, busy, slow, at_once, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setattr(cores._Others, "busy_cores", lambda self: busy)
    said = facts()
    assert f"clients train {at_once} at a time" in said["cores"]
    assert slow is None or slow in said["slow"]


def test_no_compiler_is_named(monkeypatch):
    monkeypatch.setenv("FEDCOHORT_CC", "")
    said = facts()
    assert said["mlp"] == "plain loop on cpu: there is no compiled code here"
    assert "without compiled code" in said["slow"]


def test_a_model_of_ones_own_is_found_in_a_configuration(tmp_path):
    (tmp_path / "net.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Sequential):\n    def __init__(self, shape, classes):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, classes))\n"
    )
    said = facts("demo", "-s", f"model.name={tmp_path}/net.py:Net", "-s", "seeds=1")
    assert said["net.py:Net"].startswith("plain loop on cpu") and "mlp" not in said
