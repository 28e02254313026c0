"""What the tests of clusters compare: an experiment with other options, and its rows without the clock."""

import json

from fedcohort.simulate.store.results import load

TABLE = {
    "seeds": [0, 1],
    "data": {"name": "synthetic", "samples": 300, "test_samples": 80, "classes": 4, "shape": [6]},
    "scenario": {
        "partition": {"name": "shards", "clients": 10, "per_client": 2},
        "latency": {"name": "shifted-exponential"},
        "validation": 0.1,
    },
    "model": {"name": "logistic"},
    "local": {"batch_size": 8, "steps": 3, "lr": 0.1},
    "run": {"rounds": 6, "cohort": 3, "lockstep": 2, "device": "cpu", "checkpoint_seconds": 0.0, "workers": 1},
    "selectors": {"uniform": {}, "flash": {}, "scaffolded": {"name": "uniform", "aggregator": "scaffold"}},
}


def with_options(table, **options):
    copy = json.loads(json.dumps(table))
    copy["run"].update(options)
    return copy


def rows(out, kind):
    found = getattr(load(out), kind).to_pylist()
    for row in found:
        row.pop("selection_seconds", None)
    return sorted(found, key=lambda row: [row[k] for k in ("run", "round", "client") if k in row])
