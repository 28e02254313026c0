"""Define what the benchmark runs: settings, seeds, training. Any change here makes a new version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedcohort.core.errors import InputError, UnknownNameError
from fedcohort.core.registry import nearest

VERSION = 1
TUNING_SEEDS = (0, 1, 2, 3, 4)
REPORT_SEEDS = (100, 101, 102, 103, 104)
"""Choose parameters on the tuning seeds and report results on the report seeds; a result states which it used."""

_THIRTY = {"name": "uniform-share", "share": 0.3}
_SLOW = {"name": "shifted-exponential", "straggling": 1.0, "spread": 1.0}


@dataclass(frozen=True)
class BenchmarkSetting:
    """One kind of federation.

    Attributes
    ----------
    name, source, meaning : str
        Its name, the paper it comes from, and what makes it hard.
    scenario : dict
        The section ``[scenario]``.
    run : dict
        What differs in ``[run]``.
    """

    name: str
    source: str
    meaning: str
    scenario: Mapping[str, Any]
    run: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Size:
    """How a dataset is benchmarked."""

    clients: int
    samples: int  # a client, where the setting draws with replacement
    cohort: int
    rounds: int
    model: str
    local: Mapping[str, Any]
    server: int  # samples of each class the server keeps
    evaluated: int = 2  # rounds between two evaluations


_SIZES = {
    "digits": _Size(60, 40, 6, 60, "mlp", {"batch_size": 16, "steps": 10, "lr": 0.1}, 5),
    "fashion-mnist": _Size(100, 500, 10, 200, "mlp", {"batch_size": 50, "steps": 20, "lr": 0.03}, 20),
    "cifar10": _Size(100, 500, 10, 100, "lenet", {"batch_size": 20, "steps": 20, "lr": 0.05}, 20, evaluated=5),
    "femnist": _Size(300, 0, 20, 300, "mlp", {"batch_size": 20, "steps": 20, "lr": 0.05}, 2),
}
DATASETS = tuple(_SIZES)


def suite(data: str) -> tuple[BenchmarkSetting, ...]:
    """Return the settings of a dataset.

    >>> [setting.name for setting in suite("femnist")]
    ['natural', 'natural-10%', 'natural-noise', 'natural-slow']
    """
    size = _size(data)
    if data == "femnist":
        return _natural()
    n = size.clients
    online = 20 * max(1, round(0.3 * n / 20))  # a multiple of 20 can be divided 3 : 1 over ten classes

    def spread(alpha: float) -> dict[str, Any]:
        return {"name": "dirichlet", "clients": n, "alpha": alpha}

    return (
        BenchmarkSetting("iid", "no paper", "equal clients: nothing to gain, nothing to lose", {"partition": _iid(n)}),
        BenchmarkSetting("1-class", "FedCor", "one class per client", {"partition": _shards(n, 1)}),
        BenchmarkSetting("2-classes", "FedCor", "two classes per client", {"partition": _shards(n, 2)}),
        BenchmarkSetting(
            "dirichlet",
            "FedCor",
            "Dirichlet 0.2, unequal sizes",
            {"partition": {"name": "dirichlet-qp", "clients": n, "alpha": 0.2}},
        ),
        BenchmarkSetting(
            "dirichlet-30%",
            "Fed-CBS",
            "Dirichlet 0.1, three in ten available",
            {"partition": spread(0.1), "availability": _THIRTY},
        ),
        BenchmarkSetting(
            "rare-classes",
            "Fed-CBS",
            "half of the classes at three times the clients, three in ten available",
            {"partition": {"name": "imbalanced", "clients": n, "ratio": 3}, "availability": _THIRTY},
        ),
        BenchmarkSetting(
            "rare-online",
            "Fed-CBS",
            "clients of half of the classes are three times as often available",
            {
                "partition": {"name": "classes-per-client", "clients": n, "per_client": 1},
                "availability": {"name": "class-biased", "share": online / n, "ratio": 3},
            },
        ),
        BenchmarkSetting(
            "some-skewed",
            "FedACS",
            "some clients much more skewed than others",
            {"partition": {"name": "skewness", "clients": n, "samples": size.samples, "median": 0.1, "maximum": 5.0}},
        ),
        BenchmarkSetting(
            "few-clients",
            "FedCM",
            "20 clients, each with its own mix of classes",
            {"partition": {"name": "class-heterogeneity", "clients": 20, "alpha": 0.1}},
            {"cohort": min(size.cohort, 8)},
        ),
        BenchmarkSetting(
            "dominant",
            "FLASH",
            "three in ten clients have 80% of one class",
            {"partition": {"name": "dominant-class", "clients": n, "share": 0.3, "replacement": True}},
        ),
        BenchmarkSetting(
            "noise", "FLASH", "wrong labels, 30% on average", {"partition": _iid(n), "noise": {"level": 0.3}}
        ),
        BenchmarkSetting(
            "skew-noise",
            "FLASH",
            "Dirichlet 0.3 and 30% wrong labels",
            {"partition": spread(0.3), "noise": {"level": 0.3}},
        ),
        BenchmarkSetting(
            "skew-slow",
            "FLASH",
            "Dirichlet 0.3, clients of very different speed",
            {"partition": spread(0.3), "latency": _SLOW},
        ),
        BenchmarkSetting(
            "skew-noise-slow",
            "FLASH",
            "skew, wrong labels and slow clients at once",
            {"partition": spread(0.3), "noise": {"level": 0.3}, "latency": _SLOW},
        ),
        BenchmarkSetting(
            "skew-failures",
            "no paper",
            "Dirichlet 0.3, one reply in five is lost",
            {"partition": spread(0.3), "latency": _SLOW, "failure": 0.2},
        ),
    )


def kinds(data: str, settings: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Group settings that differ only in how long clients take: for accuracy they are one kind.

    A selector that ignores time does the same in all of them, and would be counted twice.

    >>> kinds("digits", ["noise", "skew-noise", "skew-noise-slow"])
    (('noise',), ('skew-noise', 'skew-noise-slow'))
    """
    known = {setting.name: setting for setting in suite(data)} if data in DATASETS else {}
    found: dict[str, list[str]] = {}
    for name in settings:
        setting = known.get(name)
        key = name
        if setting is not None:
            owns = {part: value for part, value in setting.scenario.items() if part != "latency"}
            key = repr((sorted(owns.items()), sorted(setting.run.items())))
        found.setdefault(key, []).append(name)
    return tuple(tuple(names) for names in found.values())


def table(
    data: str, selectors: Mapping[str, Any], seeds: Sequence[int], *, settings: Sequence[str] = (), rounds: int = 0
) -> dict[str, Any]:
    """Return the benchmark as an experiment's configuration.

    Every setting holds out a tenth of each client's data and some samples at the server, whether a selector needs them
    or not, so that all of them train on the same.

    Parameters
    ----------
    data : str
        digits, fashion-mnist, cifar10 or femnist.
    selectors : mapping
        The tables ``[selectors.LABEL]``; ``uniform`` is added.
    seeds : sequence of int
    settings : sequence of str
        Only these.
    rounds : int
        Instead of the suite's; such a result is no submission.
    """
    size = _size(data)
    every = {setting.name: setting for setting in suite(data)}
    for name in settings:
        if name not in every:
            near = nearest(name, list(every))
            raise UnknownNameError(
                f"The benchmark of {data} has no setting {name!r}. Known: {', '.join(every)}.",
                hint=f"did you mean {near!r}?" if near else None,
            )
    if not seeds:
        raise InputError("The benchmark needs at least one seed.")
    chosen = [every[name] for name in settings] or list(every.values())
    return {
        "name": f"bench-{data}",
        "seeds": list(seeds),
        "data": {"name": data},
        "model": {"name": size.model},
        "local": dict(size.local),
        "scenario": {"validation": 0.1, "server_validation": size.server},
        "run": {
            "rounds": rounds or size.rounds,
            "cohort": size.cohort,
            "eval_every": size.evaluated,
            "baseline": "uniform",
        },
        "selectors": {"uniform": {}, **selectors},
        "settings": [
            {
                "name": setting.name,
                "scenario": dict(setting.scenario),
                **({"run": dict(setting.run)} if setting.run else {}),
            }
            for setting in chosen
        ],
    }


def rounds_of(data: str) -> int:
    """Return how many rounds the benchmark of a dataset makes."""
    return _size(data).rounds


def _natural() -> tuple[BenchmarkSetting, ...]:
    writers = {"name": "natural"}
    return (
        BenchmarkSetting("natural", "Fed-CBS", "real writers, all available", {"partition": writers}),
        BenchmarkSetting(
            "natural-10%",
            "Fed-CBS",
            "real writers, one in ten available",
            {"partition": writers, "availability": {"name": "uniform-share", "share": 0.1}},
        ),
        BenchmarkSetting(
            "natural-noise", "FLASH", "real writers, 30% wrong", {"partition": writers, "noise": {"level": 0.3}}
        ),
        BenchmarkSetting(
            "natural-slow", "FLASH", "real writers, slow clients", {"partition": writers, "latency": _SLOW}
        ),
    )


def _size(data: str) -> _Size:
    if data not in _SIZES:
        near = nearest(data, list(_SIZES))
        raise UnknownNameError(
            f"There is no benchmark of {data!r}. Known: {', '.join(_SIZES)}.",
            hint=f"did you mean {near!r}?" if near else None,
        )
    return _SIZES[data]


def _iid(clients: int) -> dict[str, Any]:
    # Deal samples at random: with exactly equal class counts, label noise would show in the counts.
    return {"name": "iid", "clients": clients}


def _shards(clients: int, per_client: int) -> dict[str, Any]:
    return {"name": "shards", "clients": clients, "per_client": per_client}
