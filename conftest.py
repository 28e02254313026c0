"""Shared by all tests and doctests."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import pkgutil

from hypothesis import settings

# The same examples every time, however busy the machine: `make nightly` draws new ones.
settings.register_profile("everyday", derandomize=True, deadline=None)
settings.load_profile("everyday")

# pytest's importlib mode would execute a module a second time when its own package imports it first; packages whose
# modules register things by name must therefore be imported before collection.
for _package in ("selectors", "training.filters", "training.aggregators", "scenario"):
    _path = importlib.import_module(f"fedcohort.{_package}").__path__
    for _module in pkgutil.walk_packages(_path, f"fedcohort.{_package}."):
        importlib.import_module(_module.name)
if importlib.util.find_spec("fedcohort_bench"):  # `make hosts` runs without it
    importlib.import_module("fedcohort_bench.natural")

# nvflare is in none of the extras that the tests install; `make hosts` runs what needs it.
collect_ignore_glob = [] if importlib.util.find_spec("nvflare") else ["src/fedcohort/hosts/flare/*"]


def pytest_collection_finish() -> None:
    """Keep the garbage collector away from modules and test items. Flower collects often, and took up to a second."""
    gc.collect()
    gc.freeze()
