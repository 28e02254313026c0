"""Sweeps: try several values of a selector's parameters, each as a separate selector.

``--sweep fedcor.warmup=5,15,30`` on the command line is in TOML::

    [sweep]
    fedcor.warmup = [5, 15, 30]

The selector ``fedcor`` becomes ``fedcor warmup=5``, ``fedcor warmup=15`` and ``fedcor warmup=30``. If several
parameters of a selector are swept, all combinations are tried. The rest of the selector's table stays as it is.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from fedcohort.core.registry import suggest
from fedcohort.simulate.config.toml import ConfigError, parse_toml, parse_value


def parse_sweeps(items: Iterable[str]) -> dict[str, dict[str, list[Any]]]:
    """Read ``label.parameter=value,value,...``. A value is TOML, or else text.

    >>> parse_sweeps(["fedcor.warmup=5,15", "fedcor.discount=0.5,0.9"])
    {'fedcor': {'warmup': [5, 15], 'discount': [0.5, 0.9]}}
    """
    sweep: dict[str, dict[str, list[Any]]] = {}
    for item in items:
        key, equals, text = item.partition("=")
        label, dot, parameter = key.strip().rpartition(".")
        if not (equals and dot and label and parameter and text.strip()):
            raise ConfigError(
                f"A sweep must be selector.parameter=value,value,... Got {item!r}.", hint="e.g. fedcor.warmup=5,15,30"
            )
        if parameter in sweep.get(label, {}):
            raise ConfigError(f"The sweep over {label}.{parameter} is given twice.")
        # As a TOML list, so that values may be lists or texts with commas in them.
        try:
            values = list(parse_toml(f"values = [{text}]")["values"])
        except tomllib.TOMLDecodeError:
            values = [parse_value(part.strip()) for part in text.split(",")]
        sweep.setdefault(label, {})[parameter] = values
    return sweep


def expand_sweep(selectors: Mapping[str, Any], sweep: Any) -> dict[str, Any]:
    """Return [selectors] with each swept selector replaced by its variants.

    >>> list(expand_sweep({"uniform": {}, "fedcor": {}}, {"fedcor": {"warmup": [5, 15]}}))
    ['uniform', 'fedcor warmup=5', 'fedcor warmup=15']
    """
    if not isinstance(sweep, Mapping):
        raise ConfigError(f"[sweep] must hold lists of values, selector.parameter = [...]. Got {sweep!r}.")
    for label, grid in sweep.items():
        if label not in selectors:
            raise ConfigError(
                f"The sweep names {label!r}, which is not the label of a selector. Known: {', '.join(selectors)}.",
                hint=suggest(label, selectors) or "add it to the selectors",
            )
        if not isinstance(grid, Mapping) or not grid:
            raise ConfigError(
                f"The sweep over {label!r} must name parameters, {label}.parameter = [...]. Got {grid!r}."
            )
        for parameter, values in grid.items():
            if not isinstance(values, list) or not values:
                raise ConfigError(f"The sweep over {label}.{parameter} must be a list of values. Got {values!r}.")
    result: dict[str, Any] = {}
    for label, raw in selectors.items():
        grid = sweep.get(label, {})
        for values in itertools.product(*grid.values()):  # once, with no values, for a selector that is not swept
            swept = dict(zip(grid, values, strict=True))
            name = " ".join([label, *(f"{key}={_value_text(value)}" for key, value in swept.items())])
            if name in result:
                raise ConfigError(
                    f"Two selectors would both be labelled {name!r}.", hint="relabel one, or give each value once"
                )
            # A label is not a name any more once it says the swept value, so the entry names its selector.
            base = {"name": raw} if isinstance(raw, str) else raw
            result[name] = {"name": label, **base, **swept} if swept and isinstance(base, Mapping) else raw
    return result


def _value_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
