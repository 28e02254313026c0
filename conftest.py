"""Shared by all tests and doctests."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil

import fedcohort

# pytest's importlib mode would execute a module a second time when its own package imports it first; things that
# register themselves by name must therefore be imported before collection.
for _package in ("selectors", "filters", "aggregators", "scenario", "simulate"):
    for _module in pkgutil.walk_packages(
        importlib.import_module(f"fedcohort.{_package}").__path__, f"fedcohort.{_package}."
    ):
        if importlib.util.find_spec(_module.name):
            importlib.import_module(_module.name)

__all__ = ["fedcohort"]
