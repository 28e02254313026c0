"""Define the suite ``time``: four ways to make a global model under four kinds of availability, in simulated time.

All runs get the same simulated day on the same federation: two classes are rare, their holders take three times as
long, and speeds are log-normal. The question is when a run reaches the accuracy at which uniform selection in plain
rounds ends; the number of rounds or models does not matter. The suite has two pieces, because only some selectors can
choose one client at a time. ``time.toml`` declares ways and availability.
"""

from __future__ import annotations

import importlib.resources
import math
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from fedcohort.core.errors import UnknownNameError
from fedcohort.simulate.config.experiment import Experiment
from fedcohort_bench.benchmark.suite import check_choice, filled, size_of

VERSION = 2
DATASETS = ("digits", "fashion-mnist")
DAY = 86_400.0
MOST = {"rounds": 400, "flow": 1500}  # rounds or models of a run, several times what uniform selection makes in a day
ROUNDS = "rounds"  # the way that sets the target
_WORK = 300.0  # seconds that the median client trains
_DECLARED = tomllib.loads((importlib.resources.files(__package__) / "time.toml").read_text(encoding="utf-8"))

REGIMES: dict[str, Mapping[str, Any] | None] = {name: state or None for name, state in _DECLARED["regimes"].items()}
"""The state ``online`` of each kind of availability; None means always on."""
WAYS: dict[str, str] = {name: way["meaning"] for name, way in _DECLARED["ways"].items()}
"""The ways to make a global model."""
PIECES = {piece: tuple(name for name, way in _DECLARED["ways"].items() if way["piece"] == piece) for piece in MOST}


def setting_name(regime: str, way: str) -> str:
    """Return the name of a setting."""
    return f"{regime}/{way}"


def tables(
    data: str, selectors: Mapping[str, Any], seeds: Sequence[int], *, regimes: Sequence[str] = (), rounds: int = 0
) -> dict[str, dict[str, Any]]:
    """Return two configurations: ``rounds`` with all selectors, ``flow`` with those that choose one client at a time.

    ``regimes`` chooses kinds of availability. With ``rounds``, a run makes at most this many models instead of a whole
    day, and the result is a trial. The rest is as in :func:`~fedcohort_bench.benchmark.suite.table`.
    """
    if data not in DATASETS:
        raise UnknownNameError(f"The suite 'time' is run on {' or '.join(DATASETS)}. Got {data!r}.")
    check_choice("The suite 'time'", regimes, REGIMES, seeds)
    all_selectors = {"uniform": {}, **selectors}
    in_rounds = _table(data, "rounds", all_selectors, seeds, regimes, rounds)
    # Only a selector, not its table, says whether it can choose one client at a time.
    able = {plan.label for plan in Experiment.from_dict(in_rounds).plans if plan.selector.one_at_a_time}
    # FedBuff replaces a selector's own aggregator; its plain mean of updates also suits sampling by size.
    one_by_one = {label: {**entry, "aggregator": "fedbuff"} for label, entry in all_selectors.items() if label in able}
    return {"rounds": in_rounds, "flow": _table(data, "flow", one_by_one, seeds, regimes, rounds)}


def _table(
    data: str, piece: str, selectors: Mapping[str, Any], seeds: Sequence[int], regimes: Sequence[str], rounds: int
) -> dict[str, Any]:
    size = size_of(data)
    at_work = math.ceil(1.3 * size.cohort)
    values = {"at_work": at_work, "spares": at_work - size.cohort, "buffer": size.cohort // 2}
    devices = {"speed": size.local["batch_size"] * size.local["steps"] / _WORK, "speed_spread": 0.8}
    return {
        "name": f"time-{piece}",
        "seeds": list(seeds),
        "data": {"name": data},
        "model": {"name": "mlp"},
        "local": dict(size.local),
        "scenario": {
            "partition": {"name": "rare-holders", "clients": size.clients, "rare": 2, "share": 0.1, "alpha": 0.3},
            "rare_slowness": 3.0,
            "validation": 0.1,
            "server_validation": size.server,
        },
        "run": {"rounds": rounds or MOST[piece], "seconds": DAY, "cohort": size.cohort, "baseline": "uniform"},
        "selectors": dict(selectors),
        "settings": [
            {
                "name": setting_name(regime, way),
                "scenario": {"devices": devices if state is None else {**devices, "states": {"online": dict(state)}}},
                "run": filled(_DECLARED["ways"][way]["run"], values),
            }
            for regime, state in REGIMES.items()
            if not regimes or regime in regimes
            for way in PIECES[piece]
        ],
    }
