"""``fedcohort scenario``: a week as text and picture, a fitted generator, published traces in the plain format."""

import json
import pickle
import tomllib

import numpy as np
import pytest

from fedcohort.scenario import Scenario
from fedcohort.scenario.traces import read_trace

PHONES = """
[scenario.partition]
name = "iid"
clients = 60

[scenario.devices]
speed_spread = 0.5

[scenario.devices.states.online]
session = 2400
gap = 7200
daily = 0.9
peak = 20
"""


@pytest.fixture
def phones(tmp_path):
    (tmp_path / "phones.toml").write_text(PHONES)
    return tmp_path / "phones.toml"


def test_a_week_is_drawn(command, phones):
    done = command("scenario", "show", phones, "--limit", 5)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:7]] == ["0", "15", "30", "44", "59", "on"]
    assert "of 60 clients are on" in done.stdout and "samples a second" in done.stdout


def test_a_week_as_a_picture(command, phones):
    picture = phones.with_suffix(".svg")
    assert command("scenario", "show", phones, "--picture", picture).returncode == 0
    text = picture.read_text()
    assert text.count("<svg") == 1 and text.count('fill="var(--heat1)"') > 500 and "<script" not in text


def test_a_week_as_json(command, phones):
    found = json.loads(command("scenario", "show", phones, "--clients", 500, "--format", "json").stdout)
    scenario = Scenario.from_dict(tomllib.loads(PHONES)["scenario"])
    for time, count in list(zip(found["times"], found["available"], strict=True))[::100]:
        assert count == scenario.devices.presence(np.arange(500), seed=0, time=time).on.sum()


def test_a_trace_is_converted_shown_and_fitted(command, tmp_path):
    draw = np.random.default_rng(0)
    behaviour = {
        i: {"active": (begin := np.sort(draw.integers(0, 600_000, 40)) // 100 * 100).tolist(),
            "inactive": (begin + 60).tolist()}
        for i in range(30)
    }  # fmt: skip
    capacity = {i: {"computation": float(50 + i), "communication": 4000.0} for i in range(30)}
    (tmp_path / "behave").write_bytes(pickle.dumps(behaviour))
    (tmp_path / "capacity").write_bytes(pickle.dumps(capacity))
    source = ("scenario", "convert", tmp_path / "behave", "--from", "fedscale", "--speeds", tmp_path / "capacity")
    done = command(*source, "--out", tmp_path / "t.parquet", "--out-speeds", tmp_path / "s.csv")
    assert done.returncode == 0 and "30 devices" in done.stderr
    trace = read_trace(tmp_path / "t.parquet", tmp_path / "s.csv")
    assert len(trace.names) == 30 and trace.speed.max() == pytest.approx(1000 / 150)
    assert command("scenario", "show", tmp_path / "t.parquet").returncode == 0
    fitted = command("scenario", "fit", tmp_path / "t.parquet", "--speeds", tmp_path / "s.csv")
    table = tomllib.loads(fitted.stdout)["scenario"]
    assert Scenario.from_dict(table).devices.states["online"]["session"] == pytest.approx(60, rel=0.1)


def test_the_error_says_what_cannot_be_drawn(command, tmp_path, phones):
    (tmp_path / "rounds.toml").write_text('[scenario]\npreset = "fedcor-1spc"\n')
    assert "scenario.devices" in command("scenario", "show", tmp_path / "rounds.toml").stderr
    assert ".svg" in command("scenario", "show", phones, "--picture", tmp_path / "a.png").stderr
    assert "cannot be read" in command("scenario", "fit", tmp_path / "none.csv").stderr
