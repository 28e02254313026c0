"""Define what the benchmark runs: settings, seeds and training. Any change to them makes a new version.

``suite.toml`` declares the settings and how each dataset is benchmarked.
"""

from __future__ import annotations

import importlib.resources
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedcohort.core.errors import InputError, UnknownNameError
from fedcohort.core.registry import suggest
from fedcohort_bench.natural import NATURAL

VERSION = 4
TUNING_SEEDS = (0, 1, 2, 3, 4)
REPORT_SEEDS = (500, 501, 502, 503, 504)
"""Choose parameters on the tuning seeds and report results on the report seeds; a result states which it used.

If the default selector changes after the report seeds were run, the version is raised and the report seeds are new.
"""

_TIME = ("latency", "rare_slowness")  # the parts of a scenario that only decide how long clients take
_LARGE = 100  # clients from which a dataset has the samples for federations of 500 and more
_DECLARED = tomllib.loads((importlib.resources.files(__package__) / "suite.toml").read_text(encoding="utf-8"))


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
    only: Sequence[str] = ()  # the settings to run, if all would take too long
    unit: int = 20  # the fewest clients that divide 3 : 1 between two halves of the classes; 20 for ten classes


_SIZES = {name: Size(**size) for name, size in _DECLARED["sizes"].items()}
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
        size = _SIZES["fashion-mnist"]
        return (*settings_of(size, natural=True), *settings_of(size, natural=False))
    return settings_of(_SIZES[data], natural=data in NATURAL)


def settings_of(size: Size, *, natural: bool) -> tuple[BenchmarkSetting, ...]:
    """Return the federations of data with real owners, or those that are drawn from data without owners."""
    # Availability by class divides the clients online 3 : 1, so their number is the multiple of a unit nearest to 30%.
    online = size.unit * max(1, round(0.3 * size.clients / size.unit))
    half = max(2, size.cohort)
    values = {
        **_DECLARED["values"],
        "clients": size.clients,
        "samples": size.samples,
        "half": 2 * half,
        "half_cohort": half,
        "few": min(size.cohort, 8),
        "smallest": 3 if size.clients >= _LARGE else 1,
        "online": online / size.clients,
    }
    return tuple(
        BenchmarkSetting(**{key: filled(value, values) for key, value in entry.items() if key != "large"})
        for entry in _DECLARED["natural" if natural else "drawn"]
        if size.clients >= _LARGE or not entry.get("large")
    )


def filled(value: Any, values: Mapping[str, Any]) -> Any:
    """Return a part of a declaration, with the values that its texts "$name" stand for.

    >>> filled({"partition": {"name": "iid", "clients": "$clients"}}, {"clients": 60})
    {'partition': {'name': 'iid', 'clients': 60}}
    """
    if isinstance(value, Mapping):
        return {key: filled(item, values) for key, item in value.items()}
    return values[value[1:]] if isinstance(value, str) and value.startswith("$") else value


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


def size_of(data: str) -> Size:
    """Return how a dataset is benchmarked."""
    if data not in _SIZES:
        raise UnknownNameError(
            f"There is no benchmark of {data!r}. Known: {', '.join(_SIZES)}.",
            hint=suggest(data, _SIZES),
        )
    return _SIZES[data]
