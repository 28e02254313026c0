"""C sources compiled where they run: kept, tried out, and done without where there is no compiler."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import stat
import sys
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedcohort.simulate.engine import ClientData, Engine, Jobs, library, native
from fedcohort.simulate.engine.library import build, compile_library, find_compiler, flags, load_compiled, read_sources
from fedcohort.simulate.engine.plans import JOB, draw_batches
from fedcohort.training.local import LocalTraining, batch_plan


@pytest.fixture(autouse=True)
def fresh():
    caches = (load_compiled, library._warn_once, library._temporary_folder)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.fixture
def compiler():
    if load_compiled("plans") is None:
        pytest.skip("no C compiler")
    load_compiled.cache_clear()
    return find_compiler()


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A cache in which a library was just built."""
    home = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(home))
        load_compiled.cache_clear()
        if load_compiled("plans") is None:
            pytest.skip("no C compiler")
        load_compiled.cache_clear()
    return home / "fedcohort"


@pytest.fixture
def cache(built, tmp_path, monkeypatch):
    """A copy of that cache, to be changed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shutil.copytree(built, tmp_path / "fedcohort")
    return tmp_path / "fedcohort"


@pytest.fixture(scope="module")
def zig():
    """The compiler that pip installs."""
    ziglang = pytest.importorskip("ziglang")
    return [shutil.which("zig", path=os.path.dirname(ziglang.__file__)), "cc"]


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 2**63 - 1), st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 700), st.integers(1, 80),
    st.integers(0, 25),
)  # fmt: skip
def test_batches_are_those_of_numpy(seed, round, client, n, batch_size, steps):
    local = LocalTraining(steps=1, batch_size=batch_size)
    if n == 0:
        steps = 0
    want = batch_plan(seed, round, client, n, local, steps).indices
    np.testing.assert_array_equal(_drawn(seed, round, client, n, local, steps).ravel(), want.ravel())


def _drawn(seed, round, client, n, local, steps):
    width = min(n, local.batch_size)
    out = np.full((steps, width), -1)
    job = np.array([(seed, round, client, n, steps, 0, 0, width, width)], JOB)
    draw_batches(job[job["steps"] > 0], local, out.reshape(-1))
    return out


@pytest.mark.parametrize("compiled", [True, False])
def test_batches_of_many_jobs_go_to_their_places(monkeypatch, compiled):
    if not compiled:
        monkeypatch.setenv("FEDCOHORT_CC", "")
    local = LocalTraining(steps=4, batch_size=3)
    sizes = (10, 2, 5)
    out = np.full((4, len(sizes), 3), -1)
    jobs = np.array([(7, 1, i, n, 4, 100 * i, 3 * i, 9, 3) for i, n in enumerate(sizes)], JOB)
    draw_batches(jobs, local, out.reshape(-1))
    for i, n in enumerate(sizes):
        want = batch_plan(7, 1, i, n, local).indices + 100 * i
        np.testing.assert_array_equal(out[:, i, : want.shape[1]], want)
        assert (out[:, i, want.shape[1] :] == 100 * i).all()


def test_batches_do_without_a_compiler(monkeypatch):
    local = LocalTraining(steps=4, batch_size=3)
    with_it = _drawn(1, 2, 3, 10, local, 4)
    load_compiled.cache_clear()
    monkeypatch.setenv("FEDCOHORT_CC", "")
    np.testing.assert_array_equal(_drawn(1, 2, 3, 10, local, 4), with_it)


def test_machine_code_can_be_declined_without_a_warning(monkeypatch, caplog):
    monkeypatch.setenv("FEDCOHORT_CC", "")
    with caplog.at_level(logging.WARNING):
        assert load_compiled("train") is None
    assert not caplog.records


def test_without_a_compiler_one_warning_says_what_to_do(monkeypatch, caplog):
    monkeypatch.delenv("FEDCOHORT_CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    assert load_compiled("train") is None
    assert load_compiled("plans") is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "there is no C compiler" in record.message
    assert 'pip install "fedcohort[compiler]"' in record.message


def test_a_named_compiler_that_is_not_there_is_said(monkeypatch, caplog):
    monkeypatch.setenv("FEDCOHORT_CC", "/nowhere/cc")
    assert load_compiled("train") is None
    assert "'/nowhere/cc'" in caplog.text


def test_the_compiler_from_pypi_is_found_last(monkeypatch, zig):
    monkeypatch.delenv("FEDCOHORT_CC", raising=False)
    real = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None if path is None else real(name, path=path))
    assert find_compiler() == zig
    assert "-mcpu=native" in flags(zig)
    monkeypatch.setattr(shutil, "which", lambda name, path=None: f"/bin/{name}")
    assert find_compiler() == ["/bin/cc"]
    monkeypatch.setenv("FEDCOHORT_CC", "clang -O3")
    assert find_compiler() == ["/bin/clang", "-O3"]


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.parametrize(
    ("commands", "said"),
    [
        ("exit 1", "exit status 1"),
        ('[ "$1" = --version ] && exit 0; echo no vector units >&2; exit 1', "no vector units"),
        (
            '[ "$1" = --version ] && exit 0; while [ "$1" != -o ]; do shift; done; : > "$2"',
            "did not pass its trial",
        ),
    ],
)
def test_a_compiler_that_fails_is_named_and_life_goes_on(tmp_path, monkeypatch, caplog, commands, said):
    monkeypatch.setenv("FEDCOHORT_CC", script(tmp_path / "cc", commands))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_compiled("train") is None
    assert said in caplog.text
    assert not list((tmp_path / "fedcohort").iterdir())


@pytest.mark.parametrize(
    ("name", "file", "right", "wrong", "said"),
    [
        # Compiling the training takes ten seconds each time.
        pytest.param(
            "train",
            "train.c",
            "scale * (strength - 1);",
            "scale * (strength - 2);",
            "gradient differs",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "train", "dense.h", "total[i][j] = start;", "total[i][j] = all(0);", "logits differ", marks=pytest.mark.slow
        ),
        ("plans", "plans.c", "value > most", "value >= most", "batches differ"),
    ],
)
def test_a_library_that_computes_something_else_is_refused(tmp_path, compiler, name, file, right, wrong, said):
    sources = read_sources()
    broken = {**sources, file: sources[file].replace(right.encode(), wrong.encode())}
    assert broken != sources
    with pytest.raises(RuntimeError, match=said):
        build(name, broken, compiler, tmp_path, "kept")
    assert not list(tmp_path.iterdir())


def test_a_library_is_kept_and_used_again(cache, monkeypatch):
    assert [file.suffix for file in cache.iterdir()] == [".so"]  # nothing else is left behind
    monkeypatch.setattr(library, "build", lambda *_: pytest.fail("compiled twice"))
    assert load_compiled("plans") is not None


def test_a_damaged_library_is_not_loaded(cache):
    (kept,) = cache.iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-8])
    assert load_compiled("plans") is not None
    assert kept.read_bytes() == whole  # made anew


@pytest.mark.skipif(os.name != "posix", reason="owners and modes")
@pytest.mark.parametrize("what", ["folder", "file"])
def test_a_cache_others_can_write_to_is_not_trusted(cache, monkeypatch, caplog, what):
    (kept,) = cache.iterdir()
    (cache if what == "folder" else kept).chmod(0o777)
    built = []
    real = library.build
    monkeypatch.setattr(library, "build", lambda *args: built.append(real(*args)) or built[-1])
    assert load_compiled("plans") is not None
    assert len(built) == 1
    if what == "folder":
        assert "can be written by somebody else" in caplog.text
        assert built[0].parent != cache
    else:
        assert stat.S_IMODE(kept.stat().st_mode) == 0o700


@pytest.mark.skipif(os.name != "posix", reason="owners and modes")
def test_a_cache_of_somebody_else_or_behind_a_link_is_not_trusted(tmp_path, monkeypatch):
    folder = tmp_path / "fedcohort"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert library.cache_folder() == folder
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    assert library.cache_folder() != folder
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "fedcohort").symlink_to(folder)
    assert library.cache_folder() not in (folder, tmp_path / "elsewhere" / "fedcohort")


def test_the_trial_imports_nothing_from_the_working_folder(tmp_path, monkeypatch, compiler):
    (tmp_path / "numpy.py").write_text("raise SystemExit('imported from the working folder')")
    (tmp_path / "cache").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert build("plans", read_sources(), compiler, tmp_path / "cache", "kept").exists()


@pytest.mark.slow
def test_clang_computes_what_gcc_does(tmp_path, monkeypatch, compiler, zig):
    """Built by both: each passes its trial against torch, and both train a network to nearly the same numbers."""
    sources, found = read_sources(), []
    for command in (compiler, zig):
        paths = {name: build(name, sources, command, tmp_path, name) for name in ("plans", "train")}
        found.append(trained_by(paths, monkeypatch, batch_size=8))
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_the_rest_of_a_batch_computes_as_whole_vectors_do(tmp_path, monkeypatch, compiler):
    """Batches of 21 and of 9 take turns: the rest of one is short in vectors half as long, that of the other is not."""
    found = []
    for place, halves in (("with", []), ("without", ["-DHALF=0"])):
        (tmp_path / place).mkdir()
        command = [*compiler, *flags(compiler), *halves]
        paths = {name: compile_library(name, read_sources(), command, tmp_path / place) for name in ("plans", "train")}
        found.append(trained_by(paths, monkeypatch, batch_size=21))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def trained_by(paths, monkeypatch, batch_size):
    """Return models trained by the compiled libraries, and what their evaluation says."""
    zeros = np.zeros(3, np.int64)
    monkeypatch.setattr(native, "load_compiled", {name: library.load(name, path) for name, path in paths.items()}.get)
    generator = np.random.default_rng(0)
    x, y = generator.integers(0, 256, (90, 12, 12), dtype=np.uint8), generator.integers(0, 4, 90)
    clients = ClientData(np.arange(90), np.arange(0, 91, 30), y, zeros + 5)
    local = LocalTraining(steps=5, batch_size=batch_size, lr=0.1, momentum=0.5, loss="robust")
    model = f"{__name__}:Network"
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or types.SimpleNamespace(Network=Network))
    with Engine(
        x, y, x, y, classes=4, federations=[clients], model=model, local=local, device="cpu", workers=1
    ) as engine:
        assert isinstance(engine.backend, native.NativeBackend)
        trained = engine.train(engine.init(0)[None], Jobs(zeros, zeros, np.arange(3), zeros, zeros)).params
        return [trained, *map(torch.from_numpy, engine.evaluate(trained))]


class Network(nn.Sequential):
    """A little of everything the machine code knows."""

    def __init__(self, input_shape, classes):
        super().__init__(
            nn.Conv2d(1, 5, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(180, 20), nn.ReLU(),
            nn.Linear(20, classes),
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("target", ["aarch64-linux-gnu", "aarch64-macos"])
def test_it_compiles_for_other_processors(tmp_path, zig, target):
    for name in ("plans", "train"):
        built = compile_library(
            name, read_sources(), [*zig, *library.FLAGS, "-Wall", "-Wextra", "-Werror", "-target", target], tmp_path
        )
        if target == "aarch64-linux-gnu":
            assert built.read_bytes()[18:20] == b"\xb7\x00"  # the machine in an ELF header


def test_a_cache_that_cannot_be_written_is_no_hindrance(tmp_path, monkeypatch, compiler):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert load_compiled("plans") is not None


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are flags of x86-64")
@pytest.mark.parametrize("narrower", ["-mno-avx512f", "-mno-avx"])
def test_narrower_vectors_compute_the_same(tmp_path, monkeypatch, compiler, narrower):
    monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, narrower))
    assert build("train", read_sources(), compiler, tmp_path, "kept").exists()  # tries it out
