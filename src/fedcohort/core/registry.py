"""Look things up by name: selectors, filters, aggregators, scenarios, datasets, models.

Each name is registered once; registering it again is an error. A registry knows the dotted name of the package whose
import registers fedcohort's own entries, and imports it at the first lookup. Other packages add entries through entry
points in the group ``fedcohort.<kind>s`` (for example ``fedcohort.selectors``).

Some registries also accept a reference to the user's own class in place of a name: ``module:Class`` for an importable
module, also in the current folder, or ``path/to/file.py:Class``.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from fedcohort.core.errors import FedcohortError, InputError, ParameterError, RegistryError, UnknownNameError
from fedcohort.core.params import parameters
from fedcohort.core.text import error_text, short_repr

T = TypeVar("T")
C = TypeVar("C")
log = logging.getLogger(__name__)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name closest to ``name``, or None if none is close.

    A match with the beginning of a longer name counts almost as much as a match with the whole name.

    >>> nearest("unifrom", ["uniform", "all"])
    'uniform'
    >>> nearest("tabel-1", ["figure-1", "table-1-mnist", "cable-1"])
    'table-1-mnist'
    """
    matcher = difflib.SequenceMatcher(b=name)

    def similarity(text: str) -> float:
        matcher.set_seq1(text)
        return matcher.ratio()

    scores = {text: (max(similarity(text), 0.95 * similarity(text[: len(name)])), similarity(text)) for text in known}
    best = max(scores, key=lambda text: scores[text], default=None)
    return best if best is not None and scores[best][0] >= 0.5 else None


def suggest(name: str, known: Iterable[str]) -> str | None:
    """Return a hint with the known name closest to an unknown one; None if none is close.

    >>> suggest("unifrom", ["uniform", "all"])
    "did you mean 'uniform'?"
    """
    near = nearest(name, known)
    return f"did you mean {near!r}?" if near else None


def is_reference(name: str) -> bool:
    """Whether ``name`` is a reference to a class, ``module:Class`` or ``file.py:Class``, and not a registered name."""
    return ":" in name


@contextlib.contextmanager
def user_code_errors(what: str, name: str) -> Iterator[None]:
    """Turn any error raised by the user's own code into an :class:`InputError`; our own errors pass unchanged.

    Parameters
    ----------
    what : str
        What failed, for the message.
    name : str
        The name the code was looked up by. Only code behind a reference is the user's own.
    """
    try:
        yield
    except FedcohortError:
        raise
    except (Exception, SystemExit) as error:
        if not is_reference(name):
            raise
        raise InputError(f"{what}: {error_text(error)}.") from error


def resolve_reference(reference: str) -> tuple[Any, str]:
    """Return the object a reference names, and the reference in a form that works from any folder.

    Parameters
    ----------
    reference : str
        ``module:Class`` or ``path/to/file.py:Class``; paths are relative to the current folder.
    """
    place, _, name = reference.rpartition(":")
    if place.endswith(".py"):
        path = Path(place).expanduser().resolve()
        if not path.is_file():
            raise UnknownNameError(f"There is no file {place!r}, named in {reference!r}.")
        module, whole = _module_of_file(path), f"{path}:{name}"
    else:
        module, whole = _module_of_name(place, reference), reference
    if not hasattr(module, name):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        near = nearest(name, classes)
        hint = f"did you mean '{place}:{near}'?" if near else None
        raise UnknownNameError(f"{place!r} has no class {name!r}.", hint=hint)
    return getattr(module, name), whole


def _module_of_file(path: Path) -> ModuleType:
    """Import a file once, whatever its name; it can import its neighbours."""
    # Importing a file twice would give two classes of the same name, and a selector that is not an instance of its own
    # class.
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(path) and module.__name__ != "__main__":
            return module
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    name = f"{path.stem}_{digest}"  # so that a file called random.py does not replace the module random
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise InputError(f"The file {path} cannot be imported: {error_text(error)}.") from error
    return module


def _module_of_name(name: str, reference: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except (ImportError, ValueError) as error:
        raise UnknownNameError(
            f"The module {name!r}, named in {reference!r}, cannot be imported: {error}.",
            hint="name it as module:Class or file.py:Class",
        ) from error


class Registry(Generic[T]):
    """Classes or factories by name.

    Parameters
    ----------
    kind : str
        What is registered, in the singular ("selector"); used in messages and for the entry-point group.
    package : str, optional
        Dotted name of the package whose import registers fedcohort's own entries. Without one, the module that creates
        the registry also fills it.
    base : type, optional
        The base class of all entries. With it, references to classes are accepted in place of names.
    references : bool
        Whether callers resolve references themselves, without ``base``.
    """

    def __init__(
        self,
        kind: str,
        package: str | None = None,
        base: type[T] | None = None,
        *,
        references: bool = False,
    ) -> None:
        self.kind = kind
        self.package = package
        self.base = base
        self.references = references or base is not None
        self._references: dict[Callable[..., T], str] = {}
        self._items: dict[str, Callable[..., T]] = {}
        self._package_imported = package is None
        self._plugins_loaded = False

    def register(self, name: str) -> Callable[[Callable[..., T]], Any]:
        """Return a decorator that registers a class under ``name`` and sets its ``name`` attribute.

        fedcohort's own entries are registered first, so a name clash is an error in the other package.
        """

        def decorate(item: Callable[..., T]) -> Callable[..., T]:
            self._import_package()
            if name in self._items:
                raise ParameterError(f"The {self.kind} name {name!r} is taken by {self._items[name]!r}.")
            self._items[name] = item
            if isinstance(item, type):
                item.name = name  # type: ignore[attr-defined]
            return item

        return decorate

    def _import_package(self) -> bool:
        """Import the package that fills the registry, once; return False while that import is still running."""
        if not self._package_imported:
            assert self.package is not None
            # This waits for an import in another thread, but returns at once if this thread is inside that import.
            module = importlib.import_module(self.package)
            self._package_imported = not getattr(module.__spec__, "_initializing", False)
        return self._package_imported

    def _fill(self) -> bool:
        """Import everything that registers here, once; return False if it is too early to know everything."""
        if not self._import_package():
            return False
        if not self._plugins_loaded:
            self._plugins_loaded = True  # set first, because a plug-in may look something up while it is imported
            for entry in importlib.metadata.entry_points(group=f"fedcohort.{self.kind}s"):
                try:
                    entry.load()
                except Exception as error:
                    log.warning("the %s plug-in %r could not be loaded: %s", self.kind, entry.value, error)
        return True

    def _too_early(self, subject: str) -> RegistryError:
        return RegistryError(
            f"{subject} is not known yet: {self.package}, which registers the {self.kind}s, is still being imported.",
            hint="look it up inside a function, when it is used, and not while modules are being imported",
        )

    def names(self) -> list[str]:
        """Return all names, sorted."""
        if not self._fill():
            raise self._too_early(f"The list of {self.kind}s")
        return sorted(self._items)

    def get(self, name: str) -> Callable[..., T]:
        """Return the entry named ``name``, or the class it refers to; the error suggests the nearest name."""
        if not isinstance(name, str):
            raise UnknownNameError(f"The name of a {self.kind} must be a string. Got {short_repr(name)}.")
        if self.base is not None and is_reference(name):
            return self._class_at(name)
        if name not in self:
            hint = self.hint(name)
            raise UnknownNameError(f"There is no {self.kind} {name!r}. Known: {', '.join(self.names())}.", hint=hint)
        return self._items[name]

    def hint(self, name: str) -> str | None:
        """Return a suggestion for the unknown ``name``, or None."""
        if self.references and name.endswith(".py"):
            return f"name the class in that file: {name}:CLASS"
        return suggest(name, self.names())

    def _class_at(self, reference: str) -> Callable[..., T]:
        assert self.base is not None
        item, whole = resolve_reference(reference)
        if not isinstance(item, type) or not issubclass(item, self.base):
            kind = "the class" if isinstance(item, type) else f"a {type(item).__name__}:"
            raise InputError(
                f"{reference!r} is {kind} {getattr(item, '__name__', item)!s}, not a {self.base.__name__}.",
                hint=f"name a class that derives from {self.base.__name__}",
            )
        if inspect.isabstract(item):
            missing = ", ".join(sorted(getattr(item, "__abstractmethods__", ())))
            raise InputError(f"{reference!r} is abstract: it does not define {missing}.")
        if "name" not in vars(item):  # it is not registered
            item.name = item.__name__  # type: ignore[attr-defined]
        self._references.setdefault(item, whole)
        return item

    def find_imported(self, reference: str) -> Callable[..., T] | None:
        """Return a class that was already looked up by reference in this process; import nothing.

        If no file has the whole path, one with the same name and class matches, because its folder may differ on
        another machine.
        """
        same_file: Callable[..., T] | None = None
        for item, whole in self._references.items():
            if reference == whole:
                return item
            if ".py:" in whole and Path(reference).name == Path(whole).name:
                same_file = same_file or item
        return same_file

    def reference(self, item: Callable[..., T]) -> str | None:
        """Return the reference by which a class was looked up, valid from any folder; None for a registered class."""
        return self._references.get(item)

    def create(self, name: str, /, **params: Any) -> T:
        """Build ``name`` with ``params``; the error about an unknown parameter suggests the nearest one."""
        item = self.get(name)
        if isinstance(item, type):
            known = [info.name for info in parameters(item)]
            for key in params:
                if key not in known:
                    raise ParameterError(
                        f"The {self.kind} {name!r} has no parameter {key!r}. Known: {', '.join(known) or 'none'}.",
                        hint=suggest(key, known),
                    )
        with user_code_errors(f"The {self.kind} {name!r} cannot be created", name):
            return item(**params)

    def __contains__(self, name: str) -> bool:
        complete = self._fill()
        if name not in self._items and not complete:
            raise self._too_early(f"Whether there is a {self.kind} {name!r}")
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())
