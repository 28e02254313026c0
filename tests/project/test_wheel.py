"""A built wheel, installed outside the checkout, works like the checkout."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def run(installed, *arguments, code=0):
    # The editable install of the checkout must not be found first.
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=installed.parent, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    return done.stdout


def test_it_is_the_installed_one(installed):
    where = run(installed, "-c", "import fedcohort; print(fedcohort.__file__)")
    assert where.startswith(str(installed))


def test_every_module_and_data_file_is_there(installed):
    source = ROOT / "src"
    expected = {
        str(path.relative_to(source))
        for path in (source / "fedcohort").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    missing = {name for name in expected if not (installed / name).exists()}
    assert not missing


def test_the_command_works(installed):
    here = json.loads(run(installed, "-m", "fedcohort.cli.app", "list", "--format", "json"))
    assert {"uniform", "fedcor"} <= {entry["name"] for entry in here}
    assert "passes all" not in run(installed, "-m", "fedcohort.cli.app", "check", "uniform")  # messages go to stderr


def test_it_says_what_it_needs(installed):
    (metadata,) = installed.glob("fedcohort-*.dist-info/METADATA")
    text = metadata.read_text()
    assert "License-Expression: Apache-2.0" in text and "Requires-Python: >=3.11" in text
    for extra in ("sim", "flower", "keyholder", "report", "dev"):
        assert f"Provides-Extra: {extra}" in text
