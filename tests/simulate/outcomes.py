"""What the tests of clusters compare: an experiment with other options, and its rows without the clock."""

import json

from fedcohort.simulate.results import load


def with_options(table, **options):
    copy = json.loads(json.dumps(table))
    copy["run"].update(options)
    return copy


def rows(out, kind):
    found = getattr(load(out), kind).to_pylist()
    for row in found:
        row.pop("wall_seconds", None)
    return sorted(found, key=lambda row: [row[k] for k in ("run", "round", "client") if k in row])
