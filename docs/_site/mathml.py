"""Formulas as MathML, which browsers draw without scripts, fonts or a network."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert

# Replacements for commands that the converter does not know.
_SPELLED = {r"\arg\max": r"\text{arg max}", r"\arg\min": r"\text{arg min}", r"\Big\|": r"\|"}


def mathml(latex: str, *, block: bool) -> str:
    """Return a formula as a ``math`` element."""
    text = re.sub(r"\s+", " ", latex).strip()
    for name, known in _SPELLED.items():
        text = text.replace(name, known)
    if block and r"\\" in text and "&" in text and not text.startswith(r"\begin"):
        text = rf"\begin{{aligned}}{text}\end{{aligned}}"
    markup = convert(text, display="block" if block else "inline")
    if "\\" in markup:
        raise ValueError(f"The formula {latex!r} has a command that latex2mathml does not know: {markup}")
    return markup


def _inline(self: Any, node: nodes.math) -> None:
    self.body.append(mathml(node.astext(), block=False))
    raise nodes.SkipNode


def _block(self: Any, node: nodes.math_block) -> None:
    # Wide formulas scroll in their own box, also by keyboard.
    self.body.append('<div class="math" tabindex="0" role="group" aria-label="formula">')
    self.body.append(mathml(node.astext(), block=True) + "</div>\n")
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    """Register the renderer."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
