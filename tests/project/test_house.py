"""A lint rule that ruff does not have: tests use only public names, so that private code can change freely."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Of others: Python's way to end a process without clean-up, and the name notebooks look for.
ALLOWED = {"os._exit", "_repr_html_"}
SETTERS = {"setattr", "delattr", "getattr", "hasattr"}


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of everything private that is not an object's own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.lineno, f"{ast.unparse(node.value)}.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fedcohort":
            yield from ((node.lineno, alias.name) for alias in node.names if private(alias.name))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in SETTERS:
            if ast.unparse(node.args[0]) == "self":
                continue
            texts = [a.value for a in node.args[:2] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            yield from ((node.lineno, text) for text in texts if private(text.rpartition(".")[2]))


def test_tests_use_only_what_is_public():
    """A test of a private field keeps the code from being changed and says nothing about what users see."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line, name in uses(ast.parse(path.read_text()))
        if name not in ALLOWED and name.rpartition(".")[2] not in ALLOWED
    ]
    assert found == []


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("session._states", "session._states"),
        ("a.b()._c = 1", "a.b()._c"),
        ("from fedcohort.session import Session, _check", "_check"),
        ("monkeypatch.setattr(module, '_BLOCK', 3)", "_BLOCK"),
        ("monkeypatch.setattr('fedcohort.session.rules._MOST', 3)", "fedcohort.session.rules._MOST"),
        ("getattr(thing, '_inner')", "_inner"),
    ],
)
def test_what_is_private_is_found(code, name):
    assert [found for _, found in uses(ast.parse(code))] == [name]
