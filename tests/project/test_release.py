"""What a release promises: one version everywhere, metadata that package indexes accept, files that parse."""

import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import yaml

import fedcohort

ROOT = Path(__file__).parents[2]


def test_one_version_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == fedcohort.__version__
    assert f"version = {{{fedcohort.__version__}}}" in (ROOT / "docs" / "cite.md").read_text()
    first = re.search(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert first is not None
    assert first.group(1) == fedcohort.__version__


def test_the_benchmark_belongs_to_this_version():
    project = tomllib.loads((ROOT / "bench" / "pyproject.toml").read_text())["project"]
    assert project["version"] == fedcohort.__version__
    assert f"fedcohort[sim,report]=={fedcohort.__version__}" in project["dependencies"]


def test_citation_has_what_readers_of_it_demand():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["license"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license"]


def test_continuous_integration_runs_on_declared_versions_of_python():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    matrix = workflow["jobs"]["tests"]["strategy"]["matrix"]
    supported = {f"Programming Language :: Python :: {version}" for version in matrix["python"]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert supported <= set(project["classifiers"])


def test_a_source_distribution_is_complete(tmp_path):
    build = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (archive,) = tmp_path.glob(f"fedcohort-{fedcohort.__version__}.tar.gz")
    with tarfile.open(archive) as opened:
        names = opened.getnames()
    assert any(name.endswith("src/fedcohort/simulate/engine/csrc/train.c") for name in names)
    assert any(name.endswith("LICENSE") for name in names)


# -- locks ----------------------------------------------------------------------------------------------------------

PINNED = re.compile(r"^([\w.-]+)==(\S+)[^\n]*((?:\n {4}--hash=sha256:[0-9a-f]{64}(?: \\)?)+)", re.M)
WITH_CUDA = ("nvidia-", "cuda-", "triton")  # what torch's build for Linux brings along


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(file):
    text = (ROOT / file).read_text()
    found = {canonical(name): version for name, version, _ in PINNED.findall(text)}
    assert len(found) == len(re.findall(r"^\S+==", text, re.M)), "something has no hash"
    return found


def constraints():
    lines = (ROOT / "constraints.txt").read_text().split()
    return {canonical(name): version for name, version in (line.split("==") for line in lines)}


def test_the_locks_agree_with_the_constraints():
    known = constraints()
    for file in ("requirements/lock-linux-x86_64-py311.txt", "requirements/build.txt"):
        found = pins(file)
        other = {name: version for name, version in found.items() if known.get(name, version) != version}
        assert not other, f"{file}: make lock"
        assert {n for n in found if n not in known and not n.startswith(WITH_CUDA)} <= {"setuptools"}


def test_the_locks_hold_all_that_is_asked_for():
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    requirements = [*project["project"]["dependencies"]]
    for extra in ("sim", "report", "flower"):
        requirements += project["project"]["optional-dependencies"][extra]
    found = pins("requirements/lock-linux-x86_64-py311.txt")
    built = pins("requirements/build.txt")
    for text, lock in [*((t, found) for t in requirements), *((t, built) for t in project["build-system"]["requires"])]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(lock[canonical(requirement.name)], prereleases=True), text
    assert {"pip", "build", "hatchling"} <= set(built)
