"""Pages and texts from templates; pages have one head and one style sheet, and every value is escaped.

A page is a file in ``templates/`` that extends ``base.html``; the parts that pages share are macros of ``cards.html``.
A text for pages and terminals is a ``.txt`` file there, with a sentence a line.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from fedcohort.core.text import printable
from fedcohort.core.version import __version__
from fedcohort.simulate.leaderboard import words
from fedcohort.simulate.leaderboard.formats import to_html


def render(template: str, *, package: str = "fedcohort.report", **values: Any) -> str:
    """Return a page from the templates of a package, which may use ours."""
    return _environment(package).get_template(template).render(values)


def text(template: str, **values: Any) -> str:
    """Return a template of plain text; line breaks in values are escaped, so that names cannot add lines."""
    return _texts().get_template(template).render(values)


def sentences(template: str, **values: Any) -> list[str]:
    """Return the lines of a template of plain text."""
    return [line for line in text(template, **values).split("\n") if line]


def card(macro: str, *values: Any) -> Markup:
    """Return a part of a page: a macro of ``cards.html``, called with ``values``."""
    cards = _environment("fedcohort.report").get_template("cards.html").module
    return Markup(getattr(cards, macro)(*values))  # the macro has escaped everything


def _visible(value: object) -> str:
    """Write out invisible characters and those that change the direction of text, which HTML escaping keeps."""
    return value if isinstance(value, Markup) else printable(value, lines=True)


@cache
def _texts() -> jinja2.Environment:
    # Undefined is empty: a configuration may lack any key.
    lenient = jinja2.ChainableUndefined
    return _environment("fedcohort.report").overlay(autoescape=False, finalize=printable, undefined=lenient)


@cache
def _environment(package: str) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(name) for name in (package, "fedcohort.report")]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    # Jinja's default would sort keys, which loses the order of figures, and NaN is not JSON.
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    assets = resources.files("fedcohort.report") / "assets"
    environment.globals.update(
        asset=lambda name: Markup((assets / name).read_text(encoding="utf-8")), version=__version__
    )
    # The table's own HTML escapes every cell.
    environment.filters.update(
        table=lambda table: Markup(to_html(table)),
        **{word.__name__: word for word in (words.quantity, words.names, words.number, words.percent, words.duration)},
    )
    return environment
