"""Apps for live federations, written from templates."""

from __future__ import annotations

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
    """Refuse a name that no app can have."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name) or keyword.iskeyword(name.replace("-", "_")):
        raise InputError(
            f"The directory's name becomes the app's: letters, digits, '-' and '_', beginning with a letter. "
            f"Got {name!r}."
        )


def write_app(directory: Path, files: Mapping[str, str]) -> None:
    """Write all files of an app into a new or empty directory, or none: half an app would be in the way of the next."""
    new = not directory.exists()
    if not new and (not directory.is_dir() or any(directory.iterdir())):
        raise InputError(f"{directory} exists and is not an empty directory.", hint="name a new or empty directory")
    try:
        for path, text in files.items():
            file = directory / path
            file.parent.mkdir(parents=True, exist_ok=True)
            write_file(file, text.encode())
    except BaseException:
        for item in [directory] if new else directory.iterdir():
            shutil.rmtree(item) if item.is_dir() else item.unlink(missing_ok=True)
        raise
    for path in files:
        say(out(), str(directory / path))


def template_files(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the files of a template: where each goes, and its text."""
    for item in sorted(folder.iterdir(), key=lambda item: item.name):
        if item.is_dir():
            yield from template_files(item, f"{prefix}{item.name}/")
        elif item.name.endswith(".txt"):
            yield f"{prefix}{item.name}", item.read_text()
