"""Every example in the documentation runs."""

import doctest
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
PAGES = [path for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if ">>> " in path.read_text()]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_examples_run(page):
    # In its own process, because a page may register things by name.
    script = (
        "import doctest, re, sys\n"
        "text = re.sub(r'^```.*$', '', open(sys.argv[1]).read(), flags=re.M)\n"
        "test = doctest.DocTestParser().get_doctest(text, {}, sys.argv[1], sys.argv[1], 0)\n"
        f"runner = doctest.DocTestRunner(optionflags={FLAGS})\n"
        "runner.run(test)\n"
        "sys.exit(runner.failures)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(page)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_readme_example_runs():
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert blocks, "the README shows no example"
    for block in blocks:
        done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr


def test_links_between_pages_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            # Not even the reference may be linked to: it is generated with the site, and a clone does not have it.
            if not re.match(r"[a-z]+:", target):
                assert (page.parent / target).exists(), f"{page.name} links to {target}, which does not exist"


def test_the_reference_of_commands_has_every_command_and_option(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    from _site import commands

    text = commands.page()
    for path in ("compare", "report", "journal verify", "privacy-audit", "flower new"):
        assert f"\n## {path}\n" in text
    assert "| `--set`, `-s` |" in text and "| `--seeds` |" in text


def test_the_first_table_of_selectors_has_the_figures_of_one_suite():
    text = (ROOT / "docs" / "selectors" / "index.md").read_text()
    table = text.split("| mean gain |")[1].split("\n\n")[0]
    stored = json.loads((ROOT / "bench" / "results" / "benchmark_fashion_mnist.json").read_text())
    known = {entry["label"]: entry for entry in stored["selectors"]}
    rows = re.findall(r"\[`([\w-]+)`\].*\| ([+−]\S+) ± (\S+) \|", table)
    assert len(rows) == table.count("[`") - 1  # but for uniform
    for label, gain, half in rows:
        assert gain == f"{known[label]['mean_gain']:+.1f}".replace("-", "−"), label
        assert half == f"{known[label]['interval']:.1f}", label
