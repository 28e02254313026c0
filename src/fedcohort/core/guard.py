"""Wrong arguments become the library's own errors, at no price for right ones.

A public constructor or function is marked with :func:`guarded`. As long as it returns, nothing is looked at. When it
raises something that is not the library's own, its arguments are held against its annotations, and the first that does
not fit is named:

>>> @guarded
... def mean(values: Sequence[float], weight: float = 1.0) -> float:
...     return weight * sum(values) / len(values)
>>> mean([1.0, 2.0])
1.5
>>> mean(None)
Traceback (most recent call last):
    ...
fedcohort.core.errors.InputError: The 'values' argument of mean must be Sequence[float]. Got None.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import functools
import inspect
import numbers
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, overload

import numpy as np

from fedcohort.core.errors import FedcohortError, InputError
from fedcohort.core.text import short_repr

T = TypeVar("T")
_FEW = 1000  # items of a collection that are looked at
_DEEP = 6  # collections in collections that are looked into
_KINDS = {np.bool_: "b", np.int64: "iu", np.float64: "iufb"}


@overload
def guarded(target: T) -> T: ...
@overload
def guarded(*, methods: bool = ..., plugins: bool | Collection[str] = ...) -> Callable[[T], T]: ...
def guarded(target: Any = None, *, methods: bool = False, plugins: bool | Collection[str] = ()) -> Any:
    """Mark a public function, or a class, whose wrong arguments are told as such.

    Parameters
    ----------
    target : function or class
        Of a class, the constructor is guarded; the mark goes above ``@dataclass``.
    methods : bool
        Of a class, whether its public methods are guarded as well.
    plugins : bool or names of methods
        Whether it, or which of its methods, runs code of other people, selectors above all. An error with arguments
        that fit is theirs then, and passed on as it is; otherwise it must come from what was given, and is an
        :class:`InputError` too.
    """
    if target is None:
        return functools.partial(guarded, methods=methods, plugins=plugins)
    if not isinstance(target, type):
        return _wrapped(target, target.__name__, bool(plugins))
    for name, item in list(vars(target).items()):
        if name != "__init__" and (not methods or name.startswith("_")):
            continue
        theirs = plugins if isinstance(plugins, bool) else name in plugins
        whole = target.__name__ if name == "__init__" else f"{target.__name__}.{name}"
        if isinstance(item, types.FunctionType):
            setattr(target, name, _wrapped(item, whole, theirs))
        elif isinstance(item, (classmethod, staticmethod)):
            setattr(target, name, type(item)(_wrapped(item.__func__, whole, theirs)))
    return target


def _wrapped(function: Any, name: str, plugins: bool) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except FedcohortError:
            raise
        except Exception as error:
            told = _told(function, name, args, kwargs, error, plugins)
            if told is None:
                raise
            raise told from error

    return call


def _told(
    function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception, plugins: bool
) -> InputError | None:
    """Return what to raise in the place of ``error``, None to let it pass."""
    signature = inspect.signature(function)
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return None  # not called as it must be: Python's own error says it best
    for key, value in given.items():
        wanted = signature.parameters[key]
        if wanted.kind is inspect.Parameter.VAR_KEYWORD or wanted.annotation is inspect.Parameter.empty:
            continue
        kind = _resolved(wanted.annotation, function)
        try:
            found = _misfit(value, kind, key, _DEEP)
        except Exception:  # it cannot even be looked at
            found = (key, value, kind)
        if found is not None:
            path, part, kind = found
            text = wanted.annotation if path == key and isinstance(wanted.annotation, str) else _named(kind)
            return InputError(f"The '{path}' argument of {name} must be {text}. Got {short_repr(part)}.")
    if plugins:
        return None
    return InputError(f"{name} cannot use its arguments: {short_repr(error)}.")


def _resolved(annotation: Any, function: Any) -> Any:
    """Return what an annotation means; Any where that cannot be told here."""
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, vars(typing) | inspect.unwrap(function).__globals__)
    except Exception:
        return Any


_Found = tuple[str, Any, Any]


def _misfit(value: Any, kind: Any, path: str, deep: int) -> _Found | None:
    """Return the first part of a value that is not of the kind wanted: its path, the part and its kind."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind in (Any, object) or isinstance(kind, (TypeVar, str)) or deep == 0:
        return None
    if kind is None or kind is types.NoneType:
        return None if value is None else (path, value, kind)
    if _is_array(kind, origin):
        return None if _is_array_like(value, inner) else (path, value, kind)
    if origin in (Union, types.UnionType):
        found = [_misfit(value, option, path, deep) for option in inner]
        if any(one is None for one in found):
            return None
        inside = [one for one in found if one is not None and one[0] != path]
        return inside[0] if inside else (path, value, kind)
    if origin is Literal:
        return None if any(value is one or (type(value) is type(one) and value == one) for one in inner) else (
            path, value, kind)  # fmt: skip
    if origin is collections.abc.Callable or kind is collections.abc.Callable:
        return None if callable(value) else (path, value, kind)
    plain = origin or kind
    if not isinstance(plain, type):
        return None
    if not _is_instance(value, plain):
        return path, value, kind
    return _misfit_inside(value, plain, inner, path, deep - 1)


def _misfit_inside(value: Any, plain: type, inner: tuple[Any, ...], path: str, deep: int) -> _Found | None:
    if issubclass(plain, Mapping) and len(inner) == 2:
        for key, item in list(value.items())[:_FEW]:
            found = _misfit(key, inner[0], f"{path} key", deep) or _misfit(item, inner[1], f"{path}[{key!r}]", deep)
            if found is not None:
                return found
    elif plain is tuple and inner and Ellipsis not in inner:
        if len(value) != len(inner):
            return path, value, f"a tuple of {len(inner)}"
        for i, (item, kind) in enumerate(zip(value, inner, strict=True)):
            if (found := _misfit(item, kind, f"{path}[{i}]", deep)) is not None:
                return found
    elif inner and isinstance(value, (Sequence, collections.abc.Set, np.ndarray)):
        for i, item in enumerate(list(value)[:_FEW]):
            if (found := _misfit(item, inner[0], f"{path}[{i}]", deep)) is not None:
                return found
    elif plain is collections.abc.Iterable:
        iter(value)
    elif dataclasses.is_dataclass(plain):
        for f in dataclasses.fields(value):
            if f.init and not f.name.startswith("_") and hasattr(value, f.name):
                kind = _resolved(f.type, type(value).__init__)
                if (found := _misfit(getattr(value, f.name), kind, f"{path}.{f.name}", deep)) is not None:
                    return found
    return None


def _is_instance(value: Any, plain: type) -> bool:
    try:
        if plain is float:
            return isinstance(value, numbers.Real) and not isinstance(value, bool)
        if plain is int:
            return isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if issubclass(plain, enum.Enum):
            return isinstance(value, plain) or value in plain._value2member_map_
        if plain in (Sequence, collections.abc.Iterable, collections.abc.Collection):
            listed = isinstance(value, plain) and not isinstance(value, (str, bytes, Mapping))
            return listed or isinstance(value, np.ndarray)
        if plain is PurePath:
            return isinstance(value, PurePath)
        return isinstance(value, plain)
    except TypeError:  # of a protocol that cannot be asked, or something that has no hash
        return not issubclass(plain, enum.Enum)


def _is_array(kind: Any, origin: Any) -> bool:
    return kind is np.ndarray or origin is np.ndarray or "_SupportsArray" in repr(kind)


def _is_array_like(value: Any, inner: tuple[Any, ...]) -> bool:
    try:
        array = np.asarray(value)
    except Exception:
        return False
    scalar = get_args(inner[1])[0] if len(inner) == 2 and get_args(inner[1]) else np.float64
    return array.size == 0 or array.dtype.kind in _KINDS.get(scalar, "iufb")


def _named(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "").replace("collections.abc.", "")
