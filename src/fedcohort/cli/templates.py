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
        for item in [directory] if new else directory.iterdir():
            shutil.rmtree(item) if item.is_dir() else item.unlink(missing_ok=True)
        raise
    for path in files:
        say(out(), str(directory / path))


def template_files(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each file of a template."""
    for item in sorted(folder.iterdir(), key=lambda item: item.name):
        if item.is_dir():
            yield from template_files(item, f"{prefix}{item.name}/")
        elif item.name.endswith(".txt"):
            yield f"{prefix}{item.name}", item.read_text()
