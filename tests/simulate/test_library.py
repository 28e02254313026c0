"""C sources compiled where they run: kept, tried out, and done without where there is no compiler."""

from __future__ import annotations

import logging
import os
import platform
import stat

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcohort.simulate.engine import library
from fedcohort.simulate.engine.library import build, compiled, read_sources
from fedcohort.simulate.engine.plans import draw_plan
from fedcohort.simulate.local import LocalTraining, batch_plan

COMPILER = os.environ.get("FEDCOHORT_CC") or "cc"


@pytest.fixture(autouse=True)
def fresh():
    compiled.cache_clear()
    yield
    compiled.cache_clear()


@pytest.fixture
def compiler():
    if compiled("plans") is None:
        pytest.skip("no C compiler")
    compiled.cache_clear()


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 2**63 - 1), st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 700), st.integers(1, 80),
    st.integers(0, 25),
)  # fmt: skip
def test_plans_are_those_of_numpy(seed, round, client, n, batch_size, steps):
    local = LocalTraining(steps=1, batch_size=batch_size)
    want = batch_plan(seed, round, client, n, local, steps)
    got = draw_plan(seed, round, client, n, local, steps)
    np.testing.assert_array_equal(got.indices, want.indices)
    np.testing.assert_array_equal(got.counts, want.counts)


def test_plans_do_without_a_compiler(monkeypatch):
    local = LocalTraining(steps=4, batch_size=3)
    with_it = draw_plan(1, 2, 3, 10, local, 4)
    compiled.cache_clear()
    monkeypatch.setenv("FEDCOHORT_CC", "")
    np.testing.assert_array_equal(draw_plan(1, 2, 3, 10, local, 4).indices, with_it.indices)


def test_without_a_compiler_there_is_no_library(monkeypatch, caplog):
    monkeypatch.setenv("FEDCOHORT_CC", "")
    with caplog.at_level(logging.INFO):
        assert compiled("train") is None
    assert "no C compiler" in caplog.text


def test_a_named_compiler_that_is_not_there_is_said(monkeypatch, caplog):
    monkeypatch.setenv("FEDCOHORT_CC", "/nowhere/cc")
    assert compiled("train") is None
    assert "'/nowhere/cc'" in caplog.text


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
    assert compiled("train") is None
    assert said in caplog.text
    assert not list((tmp_path / "fedcohort").iterdir())


@pytest.mark.parametrize(
    ("name", "file", "right", "wrong", "said"),
    [
        ("train", "train.c", "scale * (strength - 1);", "scale * (strength - 2);", "gradient differs"),
        ("train", "dense.h", "total[i][j] = start;", "total[i][j] = all(0);", "logits differ"),
        ("plans", "plans.c", "value > most", "value >= most", "batches differ"),
    ],
)
def test_a_library_that_computes_something_else_is_refused(tmp_path, compiler, name, file, right, wrong, said):
    sources = read_sources()
    broken = {**sources, file: sources[file].replace(right.encode(), wrong.encode())}
    assert broken != sources
    with pytest.raises(RuntimeError, match=said):
        build(name, broken, COMPILER, tmp_path / "kept.so")
    assert not (tmp_path / "kept.so").exists()


def test_a_library_is_kept_and_used_again(tmp_path, monkeypatch, compiler):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compiled("plans") is not None
    kept = list((tmp_path / "fedcohort").iterdir())
    assert [file.suffix for file in kept] == [".so"]  # nothing else is left behind
    compiled.cache_clear()
    monkeypatch.setattr(library, "build", lambda *_: pytest.fail("compiled twice"))
    assert compiled("plans") is not None


def test_a_cache_that_cannot_be_written_is_no_hindrance(tmp_path, monkeypatch, compiler):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert compiled("plans") is not None


@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are flags of x86-64")
@pytest.mark.parametrize("narrower", ["-mno-avx512f", "-mno-avx"])
def test_narrower_vectors_compute_the_same(tmp_path, monkeypatch, compiler, narrower):
    monkeypatch.setattr(library, "_FLAGS", (*library._FLAGS, narrower))
    build("train", read_sources(), COMPILER, tmp_path / "kept.so")  # tries it out
    assert (tmp_path / "kept.so").exists()
