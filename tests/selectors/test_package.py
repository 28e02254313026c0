"""The package as a whole: what is in it is exported, and what is exported is registered."""

import importlib
import inspect
import pkgutil

from fedcohort import Selector, selectors
from fedcohort.core.protocol import SELECTORS


def test_every_selector_of_the_package_is_exported_and_registered():
    found = set()
    for module in pkgutil.walk_packages(selectors.__path__, f"{selectors.__name__}."):
        for _, item in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if issubclass(item, Selector) and item.__module__ == module.name and not inspect.isabstract(item):
                found.add(item)
    exported = {item for item in vars(selectors).values() if inspect.isclass(item)}
    assert exported == found
    assert {SELECTORS.get(item.name) for item in exported} == exported
