"""What a release promises: one version everywhere, metadata that package indexes accept, files that parse."""

import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import yaml

import fedcohort

ROOT = Path(__file__).parents[1]


def test_one_version_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == fedcohort.__version__
    assert f"version = {{{fedcohort.__version__}}}" in (ROOT / "docs" / "cite.md").read_text()
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert first is not None
    assert first.group(1) == fedcohort.__version__


def test_citation_has_what_readers_of_it_demand():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["license"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license"]


def test_workflow_and_hooks_parse_and_name_what_exists():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    matrix = workflow["jobs"]["tests"]["strategy"]["matrix"]
    assert len(matrix["os"]) == len(matrix["python"]) == 3
    supported = {f"Programming Language :: Python :: {version}" for version in matrix["python"]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert supported <= set(project["classifiers"])
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert [hook["id"] for hook in hooks] == ["ruff", "format", "imports", "mypy"]


def test_a_source_distribution_is_complete(tmp_path):
    build = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (archive,) = tmp_path.glob(f"fedcohort-{fedcohort.__version__}.tar.gz")
    with tarfile.open(archive) as opened:
        names = opened.getnames()
    assert any(name.endswith("src/fedcohort/simulate/engine/csrc/train.c") for name in names)
    assert any(name.endswith("LICENSE") for name in names)
