"""The commands in README and quick start work as printed, in order; slow ones are made smaller."""

import os
import re
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path

import pytest

import fedcohort as fc

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/index.md")


def lines_of(page):
    return [
        line.removeprefix("$ ").split(" #")[0].strip()
        for block in re.findall(r"```console\n(.*?)```", (ROOT / page).read_text(), re.S)
        for line in block.replace("\\\n", " ").splitlines()
    ]


SMALLER = {
    "fedcohort demo": "--seeds 1 --rounds 2",
    "fedcohort compare --data fashion-mnist": "--data synthetic -s data.samples=2000 --model logistic "
    "--rounds 2 --seeds 1",
    "fedcohort compare": "--seeds 1 --rounds 38",
}


def environment():
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "80"}


def served(line, folder):
    """Start a server, read its page, stop it."""
    process = subprocess.Popen(
        f"exec {line} --port 0", shell=True, cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        address = process.stdout.readline().strip()
        with urllib.request.urlopen(address, timeout=30) as page:
            return page.read().decode()
    finally:
        process.terminate()
        process.wait(timeout=30)


def test_the_readme_has_no_command_that_the_quick_start_lacks():
    assert set(lines_of("README.md")) <= set(lines_of("docs/index.md"))


def test_the_command_and_the_python_call_run_the_same_experiment(tmp_path):
    command = next(line for line in lines_of("README.md") if line.startswith("fedcohort compare"))
    subprocess.run(
        f"{command} --rounds 1 --out out --quiet", shell=True, cwd=tmp_path, env=environment(), check=True, timeout=240
    )
    (arguments,) = re.findall(r"fc\.compare\(([^`]*)\)", (ROOT / "README.md").read_text())
    in_python = eval(f"fc.compare({arguments}, rounds=1, quiet=True)")
    assert fc.load(tmp_path / "out").config == in_python.config and len(in_python.runs) == 30


def test_commands_work_as_printed_in_order(tmp_path):
    for line in lines_of("docs/index.md"):
        if not line.startswith("fedcohort "):
            continue
        if line.startswith("fedcohort dashboard"):
            assert "fedcohort" in served(line, tmp_path)
            continue
        smaller = next((flags for start, flags in SMALLER.items() if line.startswith(start)), "")
        done = subprocess.run(
            f"{line} {smaller}",
            shell=True,
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        assert (done.stdout + done.stderr).strip(), line


@pytest.mark.parametrize("page", PAGES)
def test_every_other_line_is_known(page):
    """Extras, constraints and make targets in the remaining lines exist."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for line in lines_of(page):
        if line.startswith("make "):
            done = subprocess.run(
                ["make", "-n", line.split()[1]], cwd=ROOT, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
        elif line.startswith("pip install"):
            (named,) = re.findall(r"\[([a-z,]+)\]", line)
            assert set(named.split(",")) <= set(extras)
            assert (ROOT / re.search(r"-c (\S+)", line)[1]).exists()
        else:
            assert line.startswith(("fedcohort ", "python3 -m venv .venv", ". .venv/bin/activate")), line


def test_the_first_steps_are_shown():
    shown = {page: {line.split()[1] for line in lines_of(page) if line.startswith("fedcohort ")} for page in PAGES}
    assert shown["README.md"] == {"compare", "report"}
    assert {"demo", "compare", "report", "explain", "extend", "dashboard", "flower"} <= shown["docs/index.md"]
