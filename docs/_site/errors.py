"""Run the examples of the page of errors; in docs, ``python -m _site.errors`` writes what they say into the page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

PAGE = Path(__file__).parents[1] / "errors.md"
PEOPLE = Path(__file__).parents[2] / "examples" / "own-data" / "people.py"
EXAMPLE = re.compile(r"^## (\d+\. [^\n]*)\n\n```(console|python)\n(.*?)```\n\n```text\n(.*?)```", re.M | re.S)
_LONG = 3  # names of a list that the page shows


def said(kind: str, block: str, folder: Path) -> str:
    """Run an example in ``folder`` and return the error that it ends with."""
    command: list[str] | str = [sys.executable, "-c", block]
    if kind == "console":
        command = " && ".join(line.removeprefix("$ ") for line in block.splitlines())
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command, cwd=folder, shell=kind == "console", capture_output=True, text=True, check=False,
        env={**os.environ, "PATH": path, "COLUMNS": "100000"},
    )  # fmt: skip
    if done.returncode == 0:
        raise AssertionError(f"this is no error: {block}")
    start = [m.start() for m in re.finditer(r"^(error: |[\w.]+Error: )", done.stderr, re.M)]
    if not start:
        raise AssertionError(done.stderr)
    text = done.stderr[start[-1] :].strip().replace(f"{folder}/", "").replace("\n  hint:", "\nhint:")
    text = re.sub(r"^fedcohort\.[\w.]*?(\w+Error): ", r"\1: ", text)
    return re.sub(
        rf"((?:Known|It has): )((?:'?[\w -]+'?, ){{{_LONG}}})(?:'?[\w -]+'?, )*'?[\w -]+'?\.", r"\1\2... .", text
    )


def in_order(page: str, folder: Path) -> list[tuple[str, str, str]]:
    """Return the title of each example, what the page says and what the example says."""
    subprocess.run([sys.executable, str(PEOPLE)], cwd=folder, check=True)
    found = EXAMPLE.findall(page)
    return [(title, shown, said(kind, block, folder)) for title, kind, block, shown in found]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        text = PAGE.read_text()
        for _, shown, now in in_order(text, Path(place)):
            lines = [textwrap.fill(line, 118, break_on_hyphens=False) for line in now.splitlines()]
            wrapped = "\n".join(lines)
            text = text.replace(f"```text\n{shown}```", f"```text\n{wrapped}\n```")
        PAGE.write_text(text)
