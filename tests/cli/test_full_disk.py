"""Commands write files completely or not at all: a full disk keeps the previous file."""

import os
import resource
import stat
from contextlib import contextmanager

import pytest

from fedcohort.core.files import write_file
from tests.experiments import run_experiment

TABLE = {
    "data": {"name": "synthetic", "samples": 120, "test_samples": 40, "classes": 3, "shape": [4]},
    "scenario": {"partition": {"name": "shards", "clients": 6, "per_client": 2}},
    "model": {"name": "logistic"},
    "local": {"batch_size": 8, "steps": 1, "lr": 0.1},
    "run": {"rounds": 2, "cohort": 2, "workers": 1, "device": "cpu"},
    "selectors": {"uniform": {}},
}
WEEK = ["scenario", "show", "devices.toml", "-q"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("disk")
    run_experiment(TABLE, folder / "x")
    (folder / "devices.toml").write_text("[scenario.devices]\nspeed = 10.0\n")
    return folder


@contextmanager
def room_for(size):
    """Limit the size of files: the kernel rejects the rest in the middle of a write, like a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("arguments", "name", "size"),
    [
        (["report", "x", "-o", "report.html"], "report.html", 40_000),
        (["report", "x/journal/uniform-s0.sqlite", "-o", "live.html"], "live.html", 40_000),  # SQLite needs some
        ([*WEEK, "--picture", "week.svg"], "week.svg", 500),
    ],
    ids=["report", "live report", "picture"],
)
def test_a_full_disk_leaves_the_previous_file(place, command, arguments, name, size):
    file = place / name
    file.write_text("the previous one")
    files = set(os.listdir(place))
    with room_for(size):
        done = command(*arguments, cwd=place)
    assert done.returncode == 1
    assert name in done.stderr and "Traceback" not in done.stderr
    assert file.read_text() == "the previous one"
    assert set(os.listdir(place)) == files
    assert command(*arguments, cwd=place).returncode == 0
    assert file.stat().st_size > size


def test_a_full_disk_leaves_no_incomplete_app(tmp_path, command):
    with room_for(500):
        done = command("flower", "new", "app", cwd=tmp_path)
    assert done.returncode == 1 and "app" in done.stderr
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "app").mkdir()  # an empty folder may be there
    with room_for(500):
        command("flower", "new", "app", cwd=tmp_path)
    assert list((tmp_path / "app").iterdir()) == []
    assert command("flower", "new", "app", cwd=tmp_path).returncode == 0


def test_a_full_disk_leaves_no_incomplete_configuration(tmp_path, command):
    with room_for(500):
        done = command("init", cwd=tmp_path)
    assert done.returncode == 1 and "experiment.toml" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_writing_keeps_the_mode_and_never_follows_a_link(tmp_path):
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("old")
    file.chmod(0o640)
    write_file(file, b"new")
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    link.symlink_to("file")
    write_file(link, b"other")
    assert not link.is_symlink() and file.read_text() == "new"
    write_file(tmp_path / ("n" * 250), b"as long as a name may be")


def test_a_new_file_respects_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        write_file(tmp_path / "file", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_a_pipe_or_a_device_is_not_overwritten(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="pipe"):
        write_file(tmp_path / "pipe", b"x")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
