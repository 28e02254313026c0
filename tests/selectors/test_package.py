"""The package as a whole: what is in it is exported, and what is exported is registered."""

import ast
import importlib
import inspect
import pkgutil
from pathlib import Path

import fedcohort
from fedcohort import SELECTORS, Selector, selectors


def test_every_selector_of_the_package_is_exported_and_registered():
    found = set()
    for module in pkgutil.walk_packages(selectors.__path__, f"{selectors.__name__}."):
        for _, item in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if issubclass(item, Selector) and item.__module__ == module.name and not inspect.isabstract(item):
                found.add(item)
    exported = {getattr(selectors, name) for name in selectors.__all__}
    assert exported == found
    assert {SELECTORS.get(item.name) for item in exported} == exported


def test_nothing_outside_the_package_knows_a_selector_by_name():
    """Neither as a text nor by importing its class; what others need to know a selector declares."""
    root = Path(fedcohort.__file__).parent
    names = set(SELECTORS.names()) - {"all"}  # "all" means everybody in other places too
    known = []
    for path in sorted(root.rglob("*.py")):
        # A paper's table is one of selectors by name; what is said of papers is data, and nothing else reads it.
        if path.is_relative_to(root / "selectors") or path.is_relative_to(root / "reproduce"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names:
                known.append((str(path.relative_to(root)), node.value))
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedcohort.selectors"):
                known += [(str(path.relative_to(root)), alias.name) for alias in node.names]
    # The baseline everybody is compared with, the selector an app of Flower begins with unless told otherwise, and a
    # method of SciPy's that has the name of one.
    assert {entry for entry in known if entry[1] not in ("uniform", "Uniform")} <= {
        ("cli/flower.py", "power-of-choice"),
        ("privacy/noise.py", "bounded"),
    }
