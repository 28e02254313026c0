"""Conditions on the attributes that clients report, parsed from text without running it.

A condition compares attributes with constants: ``battery >= 30 and network in ("wifi", "ethernet")``. Only comparisons,
``and``, ``or``, ``not`` and constants are allowed. A client that does not report an attribute fails every condition on
it.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from fedcohort.core.errors import InputError
from fedcohort.core.text import short_repr

Attributes = Mapping[str, str | float | int | bool]
_Test = Callable[[Attributes], bool]
_MAX_LENGTH = 2000  # characters; each level of nesting takes a stack frame
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}


class _UnknownAttributeError(Exception):
    """A client does not report an attribute that a condition names."""


@dataclass(frozen=True)
class Condition:
    """A condition parsed from text.

    Attributes
    ----------
    names : frozenset of str
        The attributes in it.

    Examples
    --------
    >>> condition = Condition.read("battery >= 30 and region != 'test'")
    >>> condition.unmet({"battery": 80, "region": "north"}) is None
    True
    >>> condition.unmet({"battery": 12, "region": "north"})
    'it does not meet battery >= 30'
    >>> condition.unmet({"battery": 80})
    'it does not report its region'
    >>> Condition.read("__import__('os').system('ls')")
    Traceback (most recent call last):
        ...
    fedcohort.core.errors.InputError: The condition "__import__('os').system('ls')" may only compare attributes with ...
    """

    text: str
    names: frozenset[str]
    _clauses: tuple[tuple[str, frozenset[str], _Test], ...]

    @classmethod
    def read(cls, text: str) -> Condition:
        """Parse a condition, which may only compare attributes with constants."""
        if len(text) > _MAX_LENGTH:
            raise InputError(f"A condition may have at most {_MAX_LENGTH} characters. Got {len(text)}.")
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise InputError(f"The condition {text!r} cannot be read: {error}.") from None
        # One test per clause, so that the reason names the clause that is not met.
        parts = tree.values if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And) else [tree]
        clauses = []
        for part in parts:
            test = _test(part, text)
            names = frozenset(node.id for node in ast.walk(part) if isinstance(node, ast.Name))
            clauses.append((ast.unparse(part), names, test))
        return cls(text, frozenset().union(*(names for _, names, _ in clauses)), tuple(clauses))

    def unmet(self, attributes: Attributes) -> str | None:
        """Return why a client with ``attributes`` does not meet the condition, or None if it does."""
        # Conditions are parsed as Python, in which a hyphen is a minus.
        known = {key.replace("-", "_"): value for key, value in attributes.items()}
        for clause, names, test in self._clauses:
            try:
                if not test(known):
                    return f"it does not meet {clause}"
            except _UnknownAttributeError:
                missing = sorted(name for name in names if name not in known)
                return f"it does not report its {', '.join(missing)}"
            except TypeError:  # a string is compared with a number
                return f"it does not meet {clause}"
        return None


def _refusal(text: str) -> InputError:
    return InputError(
        f"The condition {text!r} may only compare attributes with constants, joined by and, or, not.",
        hint="for example: battery >= 30 and network in ('wifi', 'ethernet')",
    )


def _test(node: ast.expr, text: str) -> _Test:
    """Return a function that says whether attributes meet a condition."""
    match node:
        case ast.BoolOp(op=op, values=values):
            tests = [_test(value, text) for value in values]
            combine = all if isinstance(op, ast.And) else any
            return lambda attributes: combine(test(attributes) for test in tests)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = _test(operand, text)
            return lambda attributes: not inner(attributes)
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            return _comparison([left, *comparators], ops, text)
        case ast.Name() | ast.Constant(value=bool()):
            term = _term(node, text)
            return lambda attributes: term(attributes) is True
        case _:
            raise _refusal(text)


def _comparison(operands: Sequence[ast.expr], ops: Sequence[ast.cmpop], text: str) -> _Test:
    """Return the test of a chain of comparisons: ``20 <= battery < 80``."""
    terms = [_term(term, text) for term in operands]
    if not all(type(op) in _COMPARE for op in ops):
        raise _refusal(text)
    checks = [(_COMPARE[type(op)], a, b) for op, (a, b) in zip(ops, pairwise(terms), strict=True)]
    return lambda attributes: all(check(a(attributes), b(attributes)) for check, a, b in checks)


def _term(node: ast.expr, text: str) -> Callable[[Attributes], Any]:
    """Return a function that returns an attribute or a constant."""
    match node:
        case ast.Name(id=name):

            def read(attributes: Attributes) -> Any:
                if name not in attributes:
                    raise _UnknownAttributeError(name)
                return attributes[name]

            return read
        case ast.Constant(value=bool() | int() | float() | str() as value):
            return lambda attributes: value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return lambda attributes: -value
        case ast.Tuple(elts=items) | ast.List(elts=items) if all(isinstance(i, ast.Constant) for i in items):
            values = [item.value for item in items if isinstance(item, ast.Constant)]
            return lambda attributes: values
        case _:
            raise _refusal(text)


def plain_attributes(client: str, facts: Attributes) -> dict[str, str | float | int | bool]:
    """Return a client's attributes as plain values, which a journal stores without loss."""
    if not isinstance(client, str):
        raise InputError(f"Attributes are given by the name of a client, a string. Got {short_repr(client)}.")
    if not isinstance(facts, Mapping):
        raise InputError(f"The attributes of client {client!r} must be a mapping. Got {short_repr(facts)}.")
    attributes = {}
    for key, value in facts.items():
        if not isinstance(key, str):
            raise InputError(f"The name of an attribute must be a string. Got {short_repr(key)} of client {client!r}.")
        plain = value.item() if isinstance(value, np.generic) else value
        if not isinstance(plain, str | float | int):  # a bool is an int
            raise InputError(
                f"The attribute {short_repr(key)} of client {client!r} must be a string, a number, true or false. "
                f"Got {short_repr(value)}.",
                hint="give each fact its own name, or leave out unknown facts",
            )
        attributes[key] = plain
    return attributes
