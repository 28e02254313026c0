"""Things found by name: selectors, filters, aggregators, scenarios, datasets, models.

A name is registered once; a second registration is refused. A registry knows, by its dotted name, the package whose
import registers what the library brings along, and imports it when somebody first looks something up; whoever asks
need not know where things come from. Packages of other people join after that, through entry points in the group
``fedcohort.<kind>s`` (for example ``fedcohort.selectors``).
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import logging
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from fedcohort.errors import ParameterError, RegistryError, UnknownNameError
from fedcohort.params import parameters

T = TypeVar("T")
log = logging.getLogger(__name__)


def nearest(name: str, known: Iterator[str] | list[str]) -> str | None:
    """Return the known name closest to ``name``, or None when nothing is near.

    >>> nearest("unifrom", ["uniform", "all"])
    'uniform'
    """
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return found[0] if found else None


class Registry(Generic[T]):
    """Classes or factories by name.

    Parameters
    ----------
    kind : str
        What is registered, in the singular ("selector"); used in messages and for the entry-point group.
    package : str, optional
        Dotted name of the package whose import registers the library's own. Without one, the module that makes the
        registry fills it as well.
    """

    def __init__(self, kind: str, package: str | None = None) -> None:
        self.kind = kind
        self.package = package
        self._items: dict[str, Callable[..., T]] = {}
        self._package_imported = package is None
        self._plugins_loaded = False

    def register(self, name: str) -> Callable[[Callable[..., T]], Any]:
        """Return a decorator that registers a class under ``name`` and sets its ``name`` attribute.

        The library's own come first, so that a name of theirs is refused to whoever takes it, and not to them.
        """

        def decorate(item: Callable[..., T]) -> Callable[..., T]:
            self._import_package()
            if name in self._items:
                raise ParameterError(f"The {self.kind} name {name!r} is taken by {self._items[name]!r}.")
            self._items[name] = item
            if isinstance(item, type):
                item.name = name  # type: ignore[attr-defined]  # set here so that it is written once
            return item

        return decorate

    def _import_package(self) -> bool:
        """Import the package that fills the registry, once; False while that very import is still under way."""
        if not self._package_imported:
            assert self.package is not None
            module = importlib.import_module(self.package)  # another thread's import is waited for, our own is not
            self._package_imported = not getattr(module.__spec__, "_initializing", False)
        return self._package_imported

    def _fill(self) -> bool:
        """Import all that registers itself here, once; False when it is too early to know everything."""
        if not self._import_package():
            return False
        self._load_plugins()
        return True

    def _too_early(self, wanted: str) -> RegistryError:
        return RegistryError(
            f"{wanted} cannot be told yet: {self.package}, which registers the {self.kind}s, is still being imported.",
            hint="look it up when it is used, inside a function, not while modules are imported",
        )

    def _load_plugins(self) -> None:
        if self._plugins_loaded:
            return
        self._plugins_loaded = True
        for entry in importlib.metadata.entry_points(group=f"fedcohort.{self.kind}s"):
            try:
                entry.load()
            except Exception as error:
                log.warning("the %s plug-in %r could not be loaded: %s", self.kind, entry.value, error)

    def names(self) -> list[str]:
        """Return all names, sorted."""
        if not self._fill():
            raise self._too_early(f"The names of all {self.kind}s")
        return sorted(self._items)

    def get(self, name: str) -> Callable[..., T]:
        """Return what is registered under ``name``; the error names the nearest one."""
        if name not in self:
            near = nearest(name, self.names())
            hint = f"did you mean {near!r}?" if near else None
            raise UnknownNameError(f"There is no {self.kind} {name!r}. Known: {', '.join(self.names())}.", hint=hint)
        return self._items[name]

    def create(self, name: str, /, **params: Any) -> T:
        """Build ``name`` with ``params``; an unknown parameter is an error that names the nearest one."""
        item = self.get(name)
        if isinstance(item, type):
            known = [info.name for info in parameters(item)]
            for key in params:
                if key not in known:
                    near = nearest(key, known)
                    raise ParameterError(
                        f"The {self.kind} {name!r} has no parameter {key!r}. Known: {', '.join(known) or 'none'}.",
                        hint=f"did you mean {near!r}?" if near else None,
                    )
        return item(**params)

    def __contains__(self, name: str) -> bool:
        complete = self._fill()
        if name not in self._items and not complete:
            raise self._too_early(f"Whether there is a {self.kind} {name!r}")
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())
