"""Rounds by the clock: devices decide who is on, how long work takes and who drops out."""

import numpy as np
import pytest

from fedcohort.core.protocol import Status
from fedcohort.simulate.rounds.costs import BYTES_PER_PARAMETER

from .lockstep import BASE, group, rows

PHONES = {
    "speed": 5.0,
    "speed_spread": 0.5,
    "bandwidth": 2000.0,
    "bandwidth_spread": 0.5,
    "states": {"online": {"session": 60.0, "gap": 90.0, "spread": 0.5}},
}


def in_time(**changes):
    return {"scenario": {**BASE["scenario"], "devices": {**PHONES, **changes}}}


def test_a_round_is_played_by_the_clock():
    made, _ = group({**in_time(), "run": {"rounds": 40, "cohort": 3}})
    (run,) = made.runs
    devices, everybody = run.plan.scenario.devices, np.arange(8)
    speeds, bandwidths = devices.speeds(everybody, seed=1), devices.bandwidths(everybody, seed=1)
    clock, failed = 0.0, 0
    while not made.done:
        made.step()
        (row,), clients = rows(made)
        while not devices.presence(everybody, seed=1, time=clock).on.any():
            clock += 0.01
        begins = run.begins
        assert begins == pytest.approx(clock, abs=0.02)
        assert row["clock"] - begins == pytest.approx(max(client["seconds"] for client in clients))
        on, until = devices.presence(everybody, seed=1, time=begins)
        assert row["available"] == on.sum() and on[row["cohort"]].all()
        for client in clients:
            who = client["client"]
            samples = run.steps[who] * min(7, run.federation.train_sizes[who])
            needed = samples / speeds[who] + 2 * BYTES_PER_PARAMETER * made.engine.n_params / bandwidths[who]
            left = until[who] - begins
            assert client["status"] == (Status.OK if needed <= left else Status.FAILED)
            assert client["seconds"] == pytest.approx(min(needed, left), rel=1e-3)
            failed += client["status"] == Status.FAILED
        clock = row["clock"]
    assert failed > 5
    made.close()


def test_over_commitment_closes_with_the_first_answers():
    made, _ = group({**in_time(states=None), "run": {"rounds": 5, "cohort": 3, "spares": 2}})
    while not made.done:
        made.step()
        (row,), clients = rows(made)
        assert len(clients) == 5
        ok = [client["seconds"] for client in clients if client["status"] == Status.OK]
        late = [client["seconds"] for client in clients if client["status"] == Status.LATE]
        assert len(ok) == 3 and len(late) == 2 and max(ok) <= min(late)
        assert row["seconds"] == pytest.approx(max(ok), rel=1e-5)
    made.close()


def test_a_run_in_time_continues_where_it_was(tmp_path):
    whole, prepared = group(in_time(), seeds=[1, 2])
    while not whole.done:
        whole.step()
    expected = rows(whole)[0]
    cut = prepared.group(0, journals=tmp_path, device="cpu", workers=1)
    cut.start()
    cut.step()
    cut.commit()
    saved, found = cut.checkpoint(), rows(cut)[0]
    cut.close()
    again = prepared.group(0, journals=tmp_path, device="cpu", workers=1)
    again.resume(saved)
    while not again.done:
        again.step()
    found += rows(again)[0]
    for row in (*expected, *found):
        row.pop("selection_seconds")
    assert found == expected
    whole.close()
    again.close()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_run_ends_with_the_round_in_which_its_time_is_up(mode):
    options = {"rounds": 1000, "seconds": 500.0, "eval_every": 1000, "cohort": 3, "mode": mode}
    made, _ = group({**in_time(), "run": options})
    while not made.done:
        made.step()
    (run,) = made.runs
    found = made.drain().to_pylist()
    assert found[-2]["clock"] < 500 <= found[-1]["clock"] and len(found) < 1000
    assert [row["accuracy"] is not None for row in found] == [False] * (len(found) - 1) + [True]
    assert (run.state, run.reason) == ("stopped", "its 500 simulated seconds are over")
    made.close()
