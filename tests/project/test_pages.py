"""The pages that people follow: every command and every block of Python runs in order, smaller where it is long."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

import fedcohort as fc
from fedcohort.cli.app import app
from fedcohort.cli.plugins import RootGroup

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PATH = ["why", "first-comparison", "own-data", "which-selector", "flower", "flare", "write-a-selector"]
# A few commands are too long for a test; these flags come last and make them small.
SMALLER = {
    "fedcohort compare": "--rounds 2 --seeds 2",
    "fedcohort compare --selectors uniform,balanced,fedcbs": "--rounds 38 --seeds 1",
    "fedcohort run": "-s run.rounds=2",
    "fedcohort extend": "--seeds 2",
}
ONE_AFTER_THE_OTHER = re.compile(r"```(console|python)\n(.*?)```", re.S)


def commands_of(block: str) -> list[str]:
    lines = re.sub(r" \\\n\s*", " ", block).splitlines()
    return [line.removeprefix("$ ").split("  #")[0].strip() for line in lines if line.startswith("$ ")]


def all_commands() -> list[Any]:
    found = []
    for page in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]:
        if "reference" in page.parts:
            continue
        text = page.read_text(encoding="utf-8")
        for kind, block in ONE_AFTER_THE_OTHER.findall(text):
            if kind == "console":
                found += [pytest.param(line, id=f"{page.stem}: {line[:60]}") for line in commands_of(block)
                          if line.startswith("fedcohort ")]  # fmt: skip
    return found


@pytest.mark.parametrize("line", all_commands())
def test_every_command_of_every_page_is_one_that_exists(line: str) -> None:
    """Its subcommands, options and numbers are taken by the parser; whether it runs is another test's question."""
    words = shlex.split(re.split(r" [|>] | 2>|&& ", line)[0])[1:]
    group: Any = typer.main.get_command(app)
    context = group.make_context("fedcohort", [], resilient_parsing=True)
    while words and not words[0].startswith("-"):
        command = group.get_command(context, words[0])
        assert command is not None, f"there is no {words[0]}"
        if not hasattr(command, "commands"):
            break
        group, words = command, words[1:]
        context = typer.Context(group, info_name="fedcohort", parent=context)
    assert isinstance(group, RootGroup) or words
    if words and not words[0].startswith("-"):
        options = {
            name for parameter in _loaded(command).params for name in (*parameter.opts, *parameter.secondary_opts)
        }
        for word in words[1:]:
            if re.match(r"--?[a-z]", word):
                assert word.split("=")[0] in options | {"--help"}, f"{words[0]} has no {word}"


def _loaded(command: Any) -> Any:
    return command.load() if hasattr(command, "load") else command


def environment(folder: Path) -> dict[str, str]:
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "COLUMNS": "80",
    }


def run(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    smaller = max((start for start in SMALLER if line.startswith(start)), key=len, default="")
    return subprocess.run(
        f"{line} {SMALLER.get(smaller, '')}",
        shell=True, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PATH)
def test_a_page_of_the_path_runs_from_top_to_bottom(page: str, tmp_path: Path) -> None:
    text = (DOCS / "start" / f"{page}.md").read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (tmp_path / "people.py").write_text((ROOT / "examples" / "own-data" / "people.py").read_text())
    with fc.Session("oort", clients=6, journal=tmp_path / "run.sqlite") as session:
        for _ in range(3):
            session.tell(session.ask(2), loss_rms=[1.0, 2.0], duration=[1.0, 1.0])
    ran = 0
    for kind, block in ONE_AFTER_THE_OTHER.findall(text):
        if kind == "python":
            named = re.match(r"# (\w+\.py)\n", block)
            if named:
                (tmp_path / named[1]).write_text(block)
                continue
            if page == "flare":
                compile(block, page, "exec")  # nvflare is not installed here; the hosts' tests run a recipe and a site
                continue
            done = subprocess.run(
                [sys.executable, "-c", block],
                cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=200, check=False,
            )  # fmt: skip
            assert done.returncode == 0, block + done.stderr
            ran += 1
            continue
        for line in commands_of(block):
            if line.startswith("pip install"):
                named_extras = re.findall(r"\[([a-z,]+)\]", line)
                assert set(",".join(named_extras).split(",")) <= set(extras)
                continue
            if "track" in line and not _has("tensorboard"):
                continue
            done = run(line, tmp_path)
            assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
            ran += 1
    assert ran


def _has(module: str) -> bool:
    return subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("page", PATH)
def test_a_page_of_the_path_is_short_and_leads_on(page: str) -> None:
    text = (DOCS / "start" / f"{page}.md").read_text(encoding="utf-8")
    assert len(text.split()) < 700
    # A result stands near the top: a number that was measured, within the first 150 words after the title.
    assert re.search(r"\d", " ".join(text.split()[3:150]))
    for other in PATH[PATH.index(page) + 1 :][:1]:
        assert f"{other}.md" in text, f"{page} does not lead to {other}"


@pytest.mark.timeout(600)
def test_the_page_of_errors_says_what_each_example_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    from _site import errors

    examples = errors.in_order(errors.PAGE.read_text(encoding="utf-8"), tmp_path)
    assert len(examples) == 20
    # `cd docs && python -m _site.errors` writes what they say now.
    assert [(title, " ".join(shown.split())) for title, shown, _ in examples] == [
        (title, " ".join(now.split())) for title, _, now in examples
    ]


def test_the_gallery_answers_every_question_with_the_picture_that_its_command_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (DOCS / "gallery.md").read_text(encoding="utf-8")
    sys.path.insert(0, str(ROOT / "examples" / "gallery"))
    try:
        import answer
    finally:
        sys.path.pop(0)
    assert len(answer.QUESTIONS) == 10
    for name, asked in answer.QUESTIONS.items():
        assert f"## {asked['question']}" in page and f"img/gallery/{name}.svg" in page
        assert f"$ python examples/gallery/answer.py {name}\n" in page
        assert (DOCS / "img" / "gallery" / f"{name}.svg").is_file()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    said = answer.answer("federation", tmp_path / "f.html", seeds=1, rounds=2)
    assert "clients" in said and (tmp_path / "f.html").is_file()
