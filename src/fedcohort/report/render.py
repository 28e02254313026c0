"""Pages from templates, with one head and one style sheet, and every value escaped.

A page is a file in ``templates/`` that extends ``base.html``; the parts that pages share are macros of ``cards.html``.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from fedcohort.core.text import printable
from fedcohort.core.version import __version__
from fedcohort.report import palette
from fedcohort.simulate.leaderboard.formats import to_html


def render(template: str, *, package: str = "fedcohort.report", **values: Any) -> str:
    """Return a page from the templates of a package, which may use ours."""
    return _environment(package).get_template(template).render(values)


def card(macro: str, *values: Any) -> Markup:
    """Return a part of a page: a macro of ``cards.html``, called with ``values``."""
    return Markup(getattr(_cards(), macro)(*values))  # the macro has escaped everything


def _visible(value: object) -> str:
    """Write out invisible characters and those that change the direction of text, which HTML escaping keeps."""
    return value if isinstance(value, Markup) else printable(value, lines=True)


def _asset(name: str) -> Markup:
    """Return the text of a style sheet or script."""
    return Markup((resources.files("fedcohort.report") / "assets" / name).read_text(encoding="utf-8"))


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
    environment.globals.update(asset=_asset, colours=Markup(palette.css()), version=__version__)
    environment.filters["table"] = lambda table: Markup(to_html(table))  # it escapes every cell
    return environment


@cache
def _cards() -> Any:
    return _environment("fedcohort.report").get_template("cards.html").module
