"""A failing test fails the commands that run the tests, and what cannot be installed is no reason to skip one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
COMMANDS = ["Makefile", ".ci/run", ".ci/hosts", ".github/workflows/ci.yml", ".github/workflows/release.yml"]

# The first run of all tests cannot read this file, the second one can.
ONCE_BROKEN = """
from pathlib import Path

mark = Path(__file__).with_name("seen")
if not mark.exists():
    mark.touch()
    raise OSError("the disk was away for a moment")

def test_passes(): pass
"""
FAILS = "import pytest\n\n{mark}\ndef test_fails(): raise AssertionError\n"


@pytest.mark.skipif(shutil.which("make") is None or os.name != "posix", reason="needs make")
@pytest.mark.parametrize(
    "files",
    [
        {"test_a.py": ONCE_BROKEN, "test_b.py": FAILS.format(mark="")},
        {"test_a.py": FAILS.format(mark="@pytest.mark.clock")},
        {"test_a.py": FAILS.format(mark=""), "test_b.py": FAILS.format(mark="@pytest.mark.clock")},
    ],
    ids=["beside an error that passes", "in a test that depends on the clock", "in both"],
)
def test_a_failure_fails_the_command(files: dict[str, str], tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    markers = '["clock: x", "slow: x", "gpu: x"]'
    passing = "import pytest\n\ndef test_passes(): pass\n\n@pytest.mark.clock\ndef test_passes_too(): pass\n"
    files = {**files, "test_c.py": passing, "pyproject.toml": f"[tool.pytest.ini_options]\nmarkers = {markers}\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "MAKE"))}
    made = ["make", f"VENV={sys.prefix}", "-o", f"{sys.prefix}/.dev", "unit"]
    done = subprocess.run(made, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0, done.stdout


@pytest.mark.parametrize("file", COMMANDS)
def test_nothing_is_tried_again_and_no_failed_install_is_ignored(file: str) -> None:
    lines = (ROOT / file).read_text().splitlines()
    assert not [line for line in lines if re.search(r"last-failed|reruns|\|\| true", line)]
    assert not [line for line in lines if re.search(r"apt-get.*\|\|", line)]


@pytest.mark.parametrize("workflow", ["ci.yml", "release.yml"])
def test_actions_are_pinned_by_their_commit(workflow: str) -> None:
    used = re.findall(r"uses: (\S+)", (ROOT / ".github/workflows" / workflow).read_text())
    assert used and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action) for action in used)


def test_a_release_needs_no_secret_and_attests_what_it_built() -> None:
    text = (ROOT / ".github/workflows/release.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    assert "secrets." not in text and "password" not in text
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert jobs["publish"]["needs"] == "build" and jobs["publish"]["environment"] == "release"
    assert jobs["build"]["permissions"]["attestations"] == "write"
    assert any("attest" in step.get("uses", "") for step in jobs["build"]["steps"])
