"""Define the suite ``time``: four ways to make a global model under four kinds of availability, in simulated time.

All runs get the same simulated day on the same federation: two classes are rare, their holders take three times as
long, and speeds are log-normal. The question is when a run reaches the accuracy at which uniform selection in plain
rounds ends; the number of rounds or models does not matter. The suite has two pieces, because only some selectors can
choose one client at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedcohort.core.errors import UnknownNameError
from fedcohort.simulate.config.experiment import Experiment
from fedcohort_bench.benchmark.suite import Size, check_choice, size_of

VERSION = 1
DAY = 86_400.0
MOST = {"rounds": 400, "flow": 1500}  # rounds or models of a run, several times what uniform selection makes in a day
SLOWNESS = 3.0  # how many times longer holders of rare classes take

REGIMES: dict[str, Mapping[str, Any] | None] = {
    "always-on": None,
    "day-night": {"session": 14_400.0, "gap": 14_400.0, "spread": 0.5, "daily": 1.0, "peak": 21.0},
    "short-sessions": {"session": 900.0, "gap": 1800.0, "spread": 0.8},
    # `fedcohort scenario fit` on the made-up phones of bench/scripts/phones_trace.py
    "fitted": {"session": 9036.0, "gap": 15010.0, "spread": 1.844, "variety": 0.5259, "daily": 0.8161, "peak": 21.39},
}
"""The state ``online`` of each kind of availability; None means always on."""

ROUNDS, SPARES, PERIOD, BUFFER = "rounds", "over-committed", "semi-synchronous", "fedbuff"
WAYS = {
    ROUNDS: "k clients are asked, and the model waits for the last one",
    SPARES: "1.3 k clients are asked, and the round closes with the first k replies",
    PERIOD: "1.3 k clients are at work, and every ten minutes their replies make a model",
    BUFFER: "1.3 k clients are at work, and every k/2 replies make a model",
}
"""The ways to make a global model."""
PIECES = {"rounds": (ROUNDS, SPARES), "flow": (PERIOD, BUFFER)}
_TICK = 600.0  # seconds between two semi-synchronous models
_WORK = 300.0  # seconds that the median client trains


DATASETS = ("digits", "fashion-mnist")


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
    chosen = list(regimes) or list(REGIMES)
    all_selectors = {"uniform": {}, **selectors}
    in_rounds = _table(data, "rounds", all_selectors, seeds, chosen, rounds)
    # Only a selector, not its table, says whether it can choose one client at a time.
    able = {plan.label for plan in Experiment.from_dict(in_rounds).plans if plan.selector.one_at_a_time}
    # FedBuff replaces a selector's own aggregator; its plain mean of updates also suits sampling by size.
    one_by_one = {label: {**entry, "aggregator": "fedbuff"} for label, entry in all_selectors.items() if label in able}
    return {"rounds": in_rounds, "flow": _table(data, "flow", one_by_one, seeds, chosen, rounds)}


def _table(
    data: str, piece: str, selectors: Mapping[str, Any], seeds: Sequence[int], regimes: Sequence[str], rounds: int
) -> dict[str, Any]:
    size = size_of(data)
    samples = size.local["batch_size"] * size.local["steps"]
    devices = {"speed": samples / _WORK, "speed_spread": 0.8}
    partition = {"name": "rare-holders", "clients": size.clients, "rare": 2, "share": 0.1, "alpha": 0.3}
    return {
        "name": f"time-{piece}",
        "seeds": list(seeds),
        "data": {"name": data},
        "model": {"name": "mlp"},
        "local": dict(size.local),
        "scenario": {
            "partition": partition,
            "rare_slowness": SLOWNESS,
            "validation": 0.1,
            "server_validation": size.server,
        },
        "run": {"rounds": rounds or MOST[piece], "seconds": DAY, "cohort": size.cohort, "baseline": "uniform"},
        "selectors": dict(selectors),
        "settings": [
            {
                "name": setting_name(regime, way),
                "scenario": {"devices": devices if state is None else {**devices, "states": {"online": dict(state)}}},
                "run": _run(size, way),
            }
            for regime, state in REGIMES.items()
            if regime in regimes
            for way in PIECES[piece]
        ],
    }


def _run(size: Size, way: str) -> dict[str, Any]:
    """Return what a way changes in ``[run]``. Evaluations are about equally far apart in seconds."""
    at_work = math.ceil(1.3 * size.cohort)
    free = {"max_answers": 10**6}  # no limit: which clients take part is up to the selectors
    match way:
        case "rounds":
            return {}
        case "over-committed":
            return {"spares": at_work - size.cohort, "eval_every": 3}
        case "semi-synchronous":
            return {"mode": "async", "cohort": at_work, "period": _TICK, "eval_every": 3, **free}
        case _:
            return {"mode": "async", "cohort": at_work, "buffer": size.cohort // 2, "eval_every": 10, **free}
