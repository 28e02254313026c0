"""The reference of the command line, generated from the Typer app so that it cannot differ from ``--help``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import typer

from fedcohort.cli.app import app


def _commands(group: Any, above: str) -> Iterator[tuple[str, Any]]:
    for name in group.list_commands(None):
        path, command = f"{above} {name}", group.get_command(None, name)
        if command.hidden:
            continue
        if hasattr(command, "load"):  # of another package
            command = command.load()
        if hasattr(command, "commands"):
            yield from _commands(command, path)
        else:
            yield path, command


def _text(text: str) -> str:
    """Return a help text as Markdown: one line per paragraph, with angle brackets and pipes escaped."""
    return re.sub(r"\s+", " ", text.replace("\b", "")).strip().replace("<", "&lt;").replace("|", "\\|")


def _paragraphs(text: str) -> list[str]:
    lines = []
    for part in re.split(r"\n\s*\n", inspect.cleandoc(text.split("\f", maxsplit=1)[0])):
        if part.startswith("\b"):  # preformatted
            lines += ["```text", inspect.cleandoc(part.replace("\b", "")).strip(), "```", ""]
        elif part.startswith("- "):
            lines += [*(f"- `{_text(item.removeprefix('- '))}`" for item in part.splitlines()), ""]
        elif part.strip():
            lines += [_text(part), ""]
    return lines


def _default(parameter: Any) -> str:
    value = parameter.default
    if callable(value) or value in (None, False, (), []) or value == "":
        return ""
    return f"`{getattr(value, 'value', value)}`"


def _section(path: str, command: Any) -> list[str]:
    context = command.context_class(command, info_name=path)  # newer releases of typer bundle their own click
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    lines = [f"## {path.removeprefix('fedcohort ')}", "", *_paragraphs(command.help or ""), "```text", usage, "```", ""]
    rows = []
    for parameter in command.params:
        if getattr(parameter, "hidden", False):
            continue
        names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
        if parameter.param_type_name == "argument":
            names = f"`{parameter.make_metavar(context)}`"
        meaning = _text(getattr(parameter, "help", None) or "")
        if meaning or parameter.param_type_name == "option":
            rows.append(f"| {names} | {meaning} | {_default(parameter)} |")
    if rows:
        lines += ["| option | meaning | default |", "|---|---|---|", *rows, ""]
    return lines


def page() -> str:
    """Return the page."""
    root = typer.main.get_command(app)
    every = list(_commands(root, "fedcohort"))
    lines = [
        "# Commands",
        "",
        "`--help` shows the same text. `--format json` prints JSON. Results go to standard output, progress and errors",
        "to standard error. Exit status: 0 done, 1 error, 2 wrong option, 130 interrupted.",
        "",
        "| command | what it does |",
        "|---|---|",
    ]
    for path, command in every:
        short = path.removeprefix("fedcohort ")
        first = _paragraphs(command.help or "")[:1]
        lines.append(f"| [{short}](#{short.replace(' ', '-')}) | {first[0] if first else ''} |")
    lines.append("")
    for path, command in every:
        lines += _section(path, command)
    return "\n".join(lines)
