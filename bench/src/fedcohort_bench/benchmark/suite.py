"""Define what the benchmark runs: settings, seeds and training. Any change to them makes a new version."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedcohort.core.errors import InputError, UnknownNameError
from fedcohort.core.registry import suggest
from fedcohort_bench.natural import NATURAL

VERSION = 3
TUNING_SEEDS = (0, 1, 2, 3, 4)
REPORT_SEEDS = (400, 401, 402, 403, 404)
"""Choose parameters on the tuning seeds and report results on the report seeds; a result states which it used.

If the default selector changes after the report seeds were run, the version is raised and the report seeds are new.
"""

_TIME = ("latency", "rare_slowness")  # the parts of a scenario that only decide how long clients take
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
        Changes to ``[run]``.
    """

    name: str
    source: str
    meaning: str
    scenario: Mapping[str, Any]
    run: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Size:
    """How a dataset is benchmarked."""

    clients: int
    samples: int  # per client, in settings that draw with replacement
    cohort: int
    rounds: int
    model: str
    local: Mapping[str, Any]
    server: int  # samples of each class that the server keeps
    eval_every: int = 2  # rounds between two evaluations
    only: tuple[str, ...] = ()  # the settings to run, if all would take too long
    unit: int = 20  # the fewest clients that divide 3 : 1 between two halves of the classes; 20 for ten classes


_SIZES = {
    "digits": Size(60, 40, 6, 60, "mlp", {"batch_size": 16, "steps": 10, "lr": 0.1}, 5),
    "fashion-mnist": Size(100, 500, 10, 100, "mlp", {"batch_size": 50, "steps": 20, "lr": 0.05}, 20, eval_every=5),
    "cifar10": Size(
        100,
        500,
        10,
        60,
        "lenet",
        {"batch_size": 20, "steps": 20, "lr": 0.05},
        20,
        eval_every=5,
        only=(
            *("iid", "2-classes", "dirichlet", "rare-classes", "noise", "skew-slow", "rotated-20%", "inverted-5%-skew"),
            *("concept-20%", "sizes", "rare-slow", "permuted-30%", "cohort-2", "day-night"),
        ),
    ),
    "femnist": Size(300, 0, 20, 100, "mlp", {"batch_size": 20, "steps": 20, "lr": 0.05}, 2, eval_every=5),
    "watch": Size(10, 0, 3, 100, "mlp", {"batch_size": 32, "steps": 20, "lr": 0.03}, 5, eval_every=5),
    "flights": Size(175, 0, 10, 100, "mlp", {"batch_size": 50, "steps": 20, "lr": 0.05}, 20, eval_every=5),
    "birdstrikes": Size(50, 0, 8, 60, "mlp", {"batch_size": 32, "steps": 10, "lr": 0.05}, 5, eval_every=2),
    "speeches": Size(43, 0, 5, 100, "mlp", {"batch_size": 50, "steps": 40, "lr": 0.1}, 2, eval_every=5),
    "stdlib": Size(105, 0, 10, 100, "mlp", {"batch_size": 50, "steps": 40, "lr": 0.1}, 2, eval_every=5),
}
DATASETS = tuple(_SIZES)
OWN_ROUNDS = 100
"""Rounds of a benchmark on the user's own data."""
SUITES = {"natural": NATURAL}
"""Datasets that are run together, by name."""


def suite(data: str) -> tuple[BenchmarkSetting, ...]:
    """Return the settings of a dataset.

    >>> [setting.name for setting in suite("femnist")]
    ['natural', 'natural-30%', 'natural-slow']
    """
    only = size_of(data).only
    return tuple(setting for setting in _all_settings(data) if not only or setting.name in only)


def _all_settings(data: str) -> tuple[BenchmarkSetting, ...]:
    """Return all settings that a dataset could have."""
    if data not in _SIZES:  # the user's own data: names and meanings do not depend on the size
        return (*natural_settings(), *drawn_settings(_SIZES["fashion-mnist"]))
    return natural_settings() if data in NATURAL else drawn_settings(size_of(data))


def drawn_settings(size: Size) -> tuple[BenchmarkSetting, ...]:
    """Return the federations that are drawn from data without owners."""
    return (*_skews(size), *_worlds(size))


def _skews(size: Size) -> tuple[BenchmarkSetting, ...]:
    """Return the federations of the five papers: skewed labels, wrong labels, slow clients, lost replies."""
    n = size.clients
    # Availability by class divides the clients online 3 : 1, so their number is the multiple of a unit nearest to 30%.
    online = size.unit * max(1, round(0.3 * n / size.unit))

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
            "half of the classes are held by three times as many clients, three in ten available",
            {"partition": {"name": "imbalanced", "clients": n, "ratio": 3}, "availability": _THIRTY},
        ),
        BenchmarkSetting(
            "rare-online",
            "Fed-CBS",
            "clients with half of the classes are available three times as often",
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


def _worlds(size: Size) -> tuple[BenchmarkSetting, ...]:
    """Return what breaks selectors made only for skewed labels: minorities, unequal sizes, rare and slow clients."""
    n = size.clients

    def spread(alpha: float, clients: int = n) -> dict[str, Any]:
        return {"name": "dirichlet", "clients": clients, "alpha": alpha}

    def minority(
        name: str, view: str, share: float, partition: Mapping[str, Any], meaning: str, **more: Any
    ) -> BenchmarkSetting:
        return BenchmarkSetting(
            name, "no paper", meaning, {"partition": partition, "shift": {"views": [view], "share": share}, **more}
        )

    rare = {"name": "rare-holders", "clients": n, "rare": 2, "share": 0.1, "alpha": 0.3}
    half = 2 * max(2, size.cohort)  # clients of whom half take part; half of the usual number would cost too much
    few, many = 500, 5000
    here = {"partition": spread(0.3), "shift": {"views": ["rotate"], "share": 0.2}}
    big = n >= 100  # smaller datasets lack the samples for 500 clients and more
    return (
        minority("rotated-20%", "rotate", 0.2, _iid(n), "a fifth of the clients see rotated images, labels balanced"),
        minority(
            "contrast-10%-skew", "contrast", 0.1, spread(0.3), "a tenth see a quarter of the contrast, skewed labels"
        ),
        minority("blurred-10%", "blur", 0.1, _iid(n), "a tenth see blurred images, labels balanced"),
        minority(
            "inverted-5%-skew", "invert", 0.05, spread(0.3), "one client in twenty sees inverted images, skewed labels"
        ),
        minority("sketch-10%", "sketch", 0.1, _iid(n), "a tenth see only outlines, labels balanced"),
        minority("concept-20%", "relabel", 0.2, _iid(n), "a fifth use the labels with another meaning, and are right"),
        BenchmarkSetting(
            "sizes",
            "no paper",
            "sizes over three orders of magnitude, skewed labels",
            {"partition": {"name": "quantity", "clients": n, "smallest": 3 if big else 1, "alpha": 0.3}},
        ),
        BenchmarkSetting(
            "rare-slow",
            "no paper",
            "two classes are held by a tenth of the clients, who take five times as long",
            {"partition": rare, "latency": _SLOW, "rare_slowness": 5.0},
        ),
        BenchmarkSetting(
            "rare-wrong",
            "no paper",
            "two classes are held by a tenth of the clients, and 40% of their labels are wrong",
            {"partition": rare, "noise": {"level": 0.4, "rare": 2}},
        ),
        BenchmarkSetting(
            "permuted-30%",
            "no paper",
            "three in ten clients permute all labels, and are wrong",
            {"partition": spread(0.3), "noise": {"permuted": 0.3}},
        ),
        BenchmarkSetting(
            "cohort-2", "no paper", "two clients a round, a fifth see rotated images", here, {"cohort": 2}
        ),
        BenchmarkSetting(
            "cohort-half",
            "no paper",
            "half of all clients a round, a fifth see rotated images",
            {**here, "partition": spread(0.3, half)},
            {"cohort": half // 2},
        ),
        *(
            [
                BenchmarkSetting(
                    "clients-500", "no paper", "500 clients, Dirichlet 0.3", {"partition": spread(0.3, few)}
                ),
                BenchmarkSetting(
                    "clients-5000",
                    "no paper",
                    "5,000 clients of two classes, three in ten available",
                    {"partition": _shards(many, 2), "availability": _THIRTY},
                ),
            ]
            if big
            else []
        ),
        BenchmarkSetting(
            "day-night",
            "no paper",
            "clients online for half of a 24-round day, in four time zones, Dirichlet 0.3",
            {"partition": spread(0.3), "availability": {"name": "day-night", "period": 24, "awake": 0.5, "zones": 4}},
        ),
    )


def settings_by_name(data: str) -> dict[str, BenchmarkSetting]:
    """Return the settings that results on a dataset may name, by name; any dataset, also the user's own."""
    return {setting.name: setting for setting in _all_settings(data)}


def kinds(data: str, settings: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Group settings that differ only in how long clients take.

    A selector that ignores time has the same accuracy in all of them, and would be counted twice.

    >>> kinds("digits", ["noise", "skew-noise", "skew-noise-slow"])
    (('noise',), ('skew-noise', 'skew-noise-slow'))
    """
    known = settings_by_name(data)
    groups: dict[str, list[str]] = {}
    for name in settings:
        setting = known.get(name)
        key = name
        if setting is not None:
            timeless = {part: value for part, value in setting.scenario.items() if part not in _TIME}
            key = repr((sorted(timeless.items()), sorted(setting.run.items())))
        groups.setdefault(key, []).append(name)
    return tuple(tuple(names) for names in groups.values())


def table(
    data: str, selectors: Mapping[str, Any], seeds: Sequence[int], *, settings: Sequence[str] = (), rounds: int = 0
) -> dict[str, Any]:
    """Return the benchmark as an experiment's configuration.

    Every setting holds out a tenth of each client's data and some samples at the server. All selectors then train on
    the same data, whether they need held-out samples or not.

    Parameters
    ----------
    data : str
        digits, fashion-mnist, cifar10, or one with real owners (:data:`~fedcohort_bench.natural.NATURAL`).
    selectors : mapping
        The tables ``[selectors.LABEL]``; ``uniform`` is added.
    settings : sequence of str
        Only these.
    rounds : int
        Instead of the suite's rounds; such a result cannot be submitted.
    """
    return experiment_table(
        f"bench-{data}", {"name": data}, size_of(data), suite(data), selectors, seeds, settings=settings, rounds=rounds
    )


def experiment_table(
    name: str,
    data: Any,
    size: Size,
    all_settings: Sequence[BenchmarkSetting],
    selectors: Mapping[str, Any],
    seeds: Sequence[int],
    *,
    settings: Sequence[str] = (),
    rounds: int = 0,
) -> dict[str, Any]:
    """Return settings for one dataset as an experiment's configuration; see :func:`table`."""
    by_name = {setting.name: setting for setting in all_settings}
    check_choice(name, settings, by_name, seeds)
    chosen = [by_name[choice] for choice in settings] or list(by_name.values())
    return {
        "name": name,
        "seeds": list(seeds),
        "data": data,
        "model": {"name": size.model},
        "local": dict(size.local),
        "scenario": {"validation": 0.1, "server_validation": size.server},
        "run": {
            "rounds": rounds or size.rounds,
            "cohort": size.cohort,
            "eval_every": size.eval_every,
            "baseline": "uniform",
            "lockstep": 96,  # a dozen processes with thousands of runs share one GPU's memory
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


def check_choice(suite_name: str, settings: Sequence[str], known: Collection[str], seeds: Sequence[int]) -> None:
    """Raise an error for a setting that the suite does not have, or if there are no seeds."""
    for name in settings:
        if name not in known:
            raise UnknownNameError(
                f"{suite_name} has no setting {name!r}. Known: {', '.join(known)}.", hint=suggest(name, known)
            )
    if not seeds:
        raise InputError("The benchmark needs at least one seed.")


def purpose_of(seeds: Collection[int]) -> str:
    """Return what results with these seeds may be used for: "report", "tuning", or "own" for any others."""
    if set(seeds) <= set(REPORT_SEEDS):
        return "report"
    return "tuning" if set(seeds) <= set(TUNING_SEEDS) else "own"


def rounds_of(data: str) -> int:
    """Return the rounds of the benchmark on a dataset."""
    return size_of(data).rounds if data in _SIZES else OWN_ROUNDS


def natural_settings() -> tuple[BenchmarkSetting, ...]:
    """Return the federations of data with real owners."""
    owners = {"name": "natural"}
    return (
        BenchmarkSetting("natural", "Fed-CBS", "real owners, all available", {"partition": owners}),
        BenchmarkSetting(
            "natural-30%",
            "Fed-CBS",
            "real owners, three in ten available",
            {"partition": owners, "availability": _THIRTY},
        ),
        BenchmarkSetting("natural-slow", "FLASH", "real owners, slow clients", {"partition": owners, "latency": _SLOW}),
    )


def size_of(data: str) -> Size:
    """Return how a dataset is benchmarked."""
    if data not in _SIZES:
        raise UnknownNameError(
            f"There is no benchmark of {data!r}. Known: {', '.join(_SIZES)}.",
            hint=suggest(data, _SIZES),
        )
    return _SIZES[data]


def _iid(clients: int) -> dict[str, Any]:
    # Samples are dealt at random: with exactly equal class counts, label noise would show in the counts.
    return {"name": "iid", "clients": clients}


def _shards(clients: int, per_client: int) -> dict[str, Any]:
    return {"name": "shards", "clients": clients, "per_client": per_client}
