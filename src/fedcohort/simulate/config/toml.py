"""Configurations as plain tables: read TOML, override keys, merge tables, write TOML."""

from __future__ import annotations

import importlib.resources
import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedcohort.core.errors import FedcohortError, InputError
from fedcohort.core.files import read_file
from fedcohort.core.text import short_repr

_BUILTIN = importlib.resources.files("fedcohort.simulate.config") / "builtin"
DEMO = "demo"  # the name of the built-in configuration
MAX_DEPTH = 30  # levels of nested tables and lists; ours need five
_TOO_DEEP = f"tables and lists are nested more than {MAX_DEPTH} deep"
LENGTHS = ("steps", "epochs", "epochs_of_largest")  # keys of [local], of which only one may be set


class ConfigError(FedcohortError, ValueError):
    """A configuration file, key or value that cannot be used."""


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML. Tables nested too deeply and numbers with too many digits also raise ``TOMLDecodeError``."""
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise tomllib.TOMLDecodeError(_TOO_DEEP) from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError as error:  # a date that does not exist, an integer of thousands of digits
        raise tomllib.TOMLDecodeError(str(error)) from error
    # Level by level and not recursively: the parser accepts more depth than Python's stack.
    level: list[Any] = [table]
    for _ in range(MAX_DEPTH):
        inner = [value.values() if isinstance(value, dict) else value for value in level]
        level = [item for items in inner for item in items if isinstance(item, (dict, list))]
        if not level:
            return table
    raise tomllib.TOMLDecodeError(_TOO_DEEP)


def parse_value(text: str) -> Any:
    """Parse one TOML value; text that is not TOML stays text.

    >>> parse_value("0.5"), parse_value("digits")
    (0.5, 'digits')
    """
    try:
        return parse_toml(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def read_table(path: str | Path) -> dict[str, Any]:
    """Read a TOML file into plain values; relative paths in it are relative to the file."""
    file = Path(path)
    try:
        return _resolve_paths(parse_toml(read_file(file).decode()), file.parent)
    except FileNotFoundError:
        raise ConfigError(
            f"There is no configuration {file}.", hint="name a TOML file, or 'demo' for the built-in configuration"
        ) from None
    except IsADirectoryError:
        raise ConfigError(f"{file} is a directory.", hint="to continue an experiment pass it with --resume") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}.") from error


def _resolve_paths(table: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a configuration whose ``file.py:Class`` references and data files can be found from any folder."""
    # Nothing has been checked yet. Values of the wrong type are skipped here; the experiment refuses them later.
    found, settings = table.get("selectors"), table.get("settings")
    selectors = found if isinstance(found, dict) else {}
    for label, entry in list(selectors.items()):
        name = entry.get("name", label) if isinstance(entry, dict) else entry
        if (absolute := _resolve(name, folder)) != name:
            selectors[label] = {**(entry if isinstance(entry, dict) else {}), "name": absolute}
    for part in [table, *(settings if isinstance(settings, list) else ())]:
        for section in {"data", "model", "task"} & set(part if isinstance(part, dict) else ()):
            entry = part[section]
            keys = ("name", "path", "test", "loss", "metric")
            if isinstance(entry, dict):
                entry |= {key: _resolve(entry[key], folder) for key in keys if key in entry}
            else:
                part[section] = _resolve(entry, folder)
    return table


def _resolve(name: Any, folder: Path) -> Any:
    """Return ``name``, with an absolute path if it is a file or a reference ``file.py:Class`` in ``folder``."""
    if not isinstance(name, str):
        return name
    path, colon, cls = name.rpartition(":")
    if colon and path.endswith(".py") and (folder / path).is_file():
        return f"{(folder / path).resolve()}:{cls}"
    is_data = "/" in name or Path(name).suffix in (".csv", ".parquet", ".npz")
    return str((folder / name).resolve()) if is_data and (folder / name).exists() else name


def find_table(config: str) -> dict[str, Any]:
    """Read a TOML file or, if there is none called "demo", the built-in configuration of that name."""
    if config != DEMO or Path(config).exists():  # the user's own file of that name comes first
        return read_table(config)
    return tomllib.loads((_BUILTIN / "demo.toml").read_text())


def override(table: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return ``table`` with each ``key=value`` applied. A value is TOML, or else text.

    >>> override({"run": {"rounds": 5}}, ["run.rounds=7", "data.name=digits", "seeds=[1, 2]"])
    {'run': {'rounds': 7}, 'data': {'name': 'digits'}, 'seeds': [1, 2]}
    """
    return with_keys(table, dict(map(parse_override, overrides)))


def parse_override(text: str) -> tuple[str, Any]:
    """Return the key and the value of ``key=value``.

    >>> parse_override("run.rounds=7"), parse_override("data.name=digits")
    (('run.rounds', 7), ('data.name', 'digits'))
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"An override must be key=value with a dotted key. Got {text!r}.")
    return key, parse_value(value.strip())


def with_keys(table: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with other values for some dotted keys.

    >>> with_keys({"model": "mlp"}, {"run.rounds": 7, "model.hidden": [64]})
    {'model': {'name': 'mlp', 'hidden': [64]}, 'run': {'rounds': 7}}
    """
    if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
        raise InputError(
            f"'overrides' must map keys of the configuration to values. Got {short_repr(values)}.",
            hint='for example {"local.lr": 0.1}',
        )
    # One key after another: a later one may change what an earlier one has set.
    result = dict(table)
    for key, value in values.items():
        path = [part.strip() for part in key.split(".")]
        if not all(path):
            raise ConfigError(f"An override must be key=value with a dotted key. Got {short_repr(key)}.")
        if len(path) > MAX_DEPTH:
            raise ConfigError(f"The key of the override {short_repr(key)} has {len(path)} parts: {_TOO_DEEP}.")
        result = _with_value(result, path, value, key)
    return result


def _with_value(table: Mapping[str, Any], path: Sequence[str], value: Any, key: str) -> dict[str, Any]:
    part, *rest = path
    if not rest:
        return {**table, part: value}
    inner = table.get(part, {})
    if isinstance(inner, str):
        inner = {"name": inner}
    if not isinstance(inner, Mapping):
        raise ConfigError(f"The override {short_repr(key)} needs a table at {part!r}, which is {inner!r}.")
    return {**table, part: _with_value(inner, rest, value, key)}


def merge_tables(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` updated by ``change``. A table with another name or preset replaces the old table.

    >>> merge_tables({"a": {"name": "x", "p": 1}}, {"a": {"p": 2}})
    {'a': {'name': 'x', 'p': 2}}
    >>> merge_tables({"a": {"name": "x", "p": 1}}, {"a": {"name": "y"}})
    {'a': {'name': 'y'}}
    """
    merged = dict(base)
    for key, value in change.items():
        old = base.get(key)
        if isinstance(old, str):
            old = {"preset" if key == "scenario" else "name": old}
        # Parameters belong to the name or preset they were written for; another one starts from its own defaults.
        if (
            isinstance(value, Mapping)
            and isinstance(old, Mapping)
            and all(value.get(tag, old.get(tag)) == old.get(tag) for tag in ("name", "preset"))
        ):
            # Of the lengths of local training, only one may be set.
            lengths = LENGTHS if key == "local" and any(length in value for length in LENGTHS) else ()
            merged[key] = merge_tables({name: item for name, item in old.items() if name not in lengths}, value)
        else:
            merged[key] = value
    return merged


def to_toml(table: Mapping[str, Any]) -> str:
    """Return plain values as TOML: scalars first, then tables.

    >>> print(to_toml({"a": 1, "t": {"x": [1, 2], "u": {"y": "z"}}}), end="")
    a = 1
    <BLANKLINE>
    [t]
    x = [1, 2]
    <BLANKLINE>
    [t.u]
    y = "z"
    """
    lines: list[str] = []
    _write_table(lines, (), table)
    return "\n".join(lines).strip() + "\n"


# The standard library reads TOML and does not write it.
def _write_table(lines: list[str], path: tuple[str, ...], table: Mapping[str, Any], many: bool = False) -> None:
    def is_list_of_tables(value: Any) -> bool:
        return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)

    # In TOML a key belongs to the header above it, so plain values must come before inner tables.
    inner = {key: value for key, value in table.items() if isinstance(value, Mapping) or is_list_of_tables(value)}
    simple = {key: value for key, value in table.items() if key not in inner}
    if path and (simple or many or not table):
        name = ".".join(_key(part) for part in path)
        lines += ["", f"[[{name}]]" if many else f"[{name}]"]
    lines += [f"{_key(key)} = {_value(value)}" for key, value in simple.items()]
    for key, value in inner.items():
        many = not isinstance(value, Mapping)
        for item in value if many else [value]:
            _write_table(lines, (*path, key), item, many)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key, ensure_ascii=False)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, float):
        return repr(float(value))  # nan and inf are TOML too
    if isinstance(value, int):
        return str(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + "}"
    raise ConfigError(f"TOML cannot represent {value!r}.")
