"""The public names, read from the page that lists them."""

import importlib
import inspect
import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "public.md"


def names() -> dict[str, list[str]]:
    """Return the public names of each module, in the order of the page."""
    found: dict[str, list[str]] = {}
    module = ""
    for line in PAGE.read_text().splitlines():
        if heading := re.fullmatch(r"## `([\w.]+)`", line):
            module = heading[1]
            found[module] = []
        elif module and line.startswith(("- `", "  `")):
            found[module] += re.findall(r"`(\w+)`", line)
    return found


def python_page() -> str:
    """Return the reference: every public name with its signature and docstring."""
    lines = ["# Python", "", "Signatures of the [public names](../public.md).", ""]
    for path, listed in names().items():
        module = importlib.import_module(path)
        lines += [f"## `{path}`", ""]
        for name in listed:
            thing = getattr(module, name)
            if inspect.ismodule(thing):
                directive, target, options = "automodule", thing.__name__, ["   :members:"]
            elif inspect.isclass(thing):
                directive, target, options = "autoclass", f"{thing.__module__}.{thing.__qualname__}", ["   :members:"]
            elif inspect.isfunction(thing):
                directive, target, options = "autofunction", f"{thing.__module__}.{thing.__qualname__}", []
            else:
                directive, target, options = "autodata", f"{path}.{name}", []
            lines += ["```{eval-rst}", f".. {directive}:: {target}", *options, "```", ""]
    return "\n".join(lines)


def methods_page() -> str:
    """Return the docstrings of what is chosen by name: its formula, its sources and how it deviates from them."""
    from fedcohort.core.protocol import SELECTORS
    from fedcohort.training.aggregators import AGGREGATORS
    from fedcohort.training.filters import FILTERS

    lines = ["# Methods", "", "Each method as it is built: its rule, its paper and every deviation from it.", ""]
    for title, registry in (("Selectors", SELECTORS), ("Filters", FILTERS), ("Aggregators", AGGREGATORS)):
        lines += [f"## {title}", ""]
        for name in registry.names():
            kind = registry.get(name)
            target = f"{kind.__module__}.{kind.__qualname__}"
            lines += [f"### {name}", "", "```{eval-rst}", f".. autoclass:: {target}", "```", ""]
    return "\n".join(lines)
