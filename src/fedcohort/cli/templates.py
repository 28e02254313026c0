"""Apps for live federations, written from templates."""

from __future__ import annotations

import importlib.resources
import keyword
import re
import shutil
from collections.abc import Iterator, Mapping
from importlib.resources.abc import Traversable
from pathlib import Path

from fedcohort.cli.output import out
from fedcohort.core.errors import InputError
from fedcohort.core.files import write_file
from fedcohort.core.terminal import say


def check_name(name: str) -> None:
    """Raise an error if no app can have this name."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name) or keyword.iskeyword(name.replace("-", "_")):
        raise InputError(
            "The directory's name is also the app's. It must begin with a letter and have only letters, digits, '-' "
            f"and '_'. Got {name!r}."
        )


def write_app(directory: Path, files: Mapping[str, str]) -> None:
    """Write the files of an app into a new or empty directory; after a failure it is as before, for another try."""
    new = not directory.exists()
    if not new and (not directory.is_dir() or any(directory.iterdir())):
        raise InputError(f"{directory} exists and is not an empty directory.", hint="name a new or empty directory")
    try:
        for path, text in files.items():
            file = directory / path
            file.parent.mkdir(parents=True, exist_ok=True)
            write_file(file, text.encode())
    except BaseException:
        # The directory was new or empty, so everything in it is ours.
        for item in [directory] if new else directory.iterdir():
            shutil.rmtree(item) if item.is_dir() else item.unlink(missing_ok=True)
        raise
    for path in files:
        say(out(), str(directory / path))


def fill_template(host: str, values: Mapping[str, str]) -> dict[str, str]:
    """Return the files of a host's template as path -> text, with every ``@key@`` replaced by its value."""
    # Names in @, because braces and dollars are syntax in the files themselves.
    template = importlib.resources.files("fedcohort.hosts") / host / "template"
    return {path: re.sub(r"@(\w+)@", lambda found: values[found[1]], text) for path, text in _files(template)}


def _files(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, str]]:
    for item in sorted(folder.iterdir(), key=lambda item: item.name):
        if item.is_dir():
            yield from _files(item, f"{prefix}{item.name}/")
        elif item.name.endswith(".txt"):
            yield f"{prefix}{item.name.removesuffix('.txt')}", item.read_text()
