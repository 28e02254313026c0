"""The live feed, shadows and trackers of a running experiment."""

import json

import pytest

from fedcohort.journal import read_journal
from fedcohort.session.explain import explain_round
from fedcohort.simulate.config.experiment import ConfigError, Experiment
from fedcohort.simulate.rounds.runner import Simulation

TABLE = {
    "seeds": [3],
    "scenario": {"partition": {"name": "shards", "clients": 12, "per_client": 2}, "failure": 0.3},
    "local": {"batch_size": 8, "steps": 2, "lr": 0.05},
    "run": {"rounds": 6, "cohort": 3, "eval_every": 2, "workers": 1, "shadows": ["fedcbs", "uniform"]},
    "selectors": {"uniform": {}, "fedcbs": {}},
}


def test_every_round_is_in_the_feed_and_shadows_are_on_record(tmp_path):
    simulation = Simulation(Experiment.from_dict(TABLE), tmp_path / "out", device="cpu")
    assert simulation.run() == "finished"
    lines = [json.loads(line) for line in (tmp_path / "out" / "live.jsonl").read_text().splitlines()]
    assert sorted((line["run"], line["round"]) for line in lines) == [
        (run, round_) for run in ("fedcbs-s3", "uniform-s3") for round_ in range(6)
    ]
    for line in lines:
        assert len(line["cohort"]) == len(line["statuses"]) == len(line["durations"]) == 3
        assert (line["accuracy"] is None) == (line["round"] % 2 == 0)
    assert any(status != 0 for line in lines for status in line["statuses"])
    journal = read_journal(tmp_path / "out" / "journal" / "uniform-s3.sqlite")
    assert set(explain_round(journal, 2).shadows) == {"fedcbs"}  # nobody shadows himself


def test_a_shadow_must_be_one_of_the_selectors():
    with pytest.raises(ConfigError, match="shadow 'fedcb' is no label"):
        Experiment.from_dict({**TABLE, "run": {"shadows": ["fedcb"]}})
