"""Datasets: small files of every format are written and read back; errors must name damaged files."""

import gzip
import http.server
import os
import pickle
import struct
import tarfile
import threading

import numpy as np
import pytest

from fedcohort.core.errors import DataError
from fedcohort.simulate.data import (
    DATASETS,
    Dataset,
    FashionMnist,
    Mnist,
    load_dataset,
    places,
)
from fedcohort.simulate.data.places import Resource, fetch

RNG = np.random.default_rng(0)
GREY = {
    "x_train": RNG.integers(0, 256, (20, 28, 28), dtype=np.uint8),
    "y_train": (np.arange(20) % 10).astype(np.uint8),
    "x_test": RNG.integers(0, 256, (10, 28, 28), dtype=np.uint8),
    "y_test": np.arange(10).astype(np.uint8),
}
COLOUR = {
    "x_train": RNG.integers(0, 256, (50, 32, 32, 3), dtype=np.uint8),
    "y_train": (np.arange(50) % 10).astype(np.uint8),
    "x_test": RNG.integers(0, 256, (10, 32, 32, 3), dtype=np.uint8),
    "y_test": np.arange(10).astype(np.uint8),
}
IDX = ["train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"]


pytestmark = pytest.mark.usefixtures("nothing_but_the_test_folder")


def idx_bytes(array):
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_idx(folder, packed=True, arrays=GREY):
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in zip(IDX, arrays.values(), strict=True):
        body = idx_bytes(array)
        (folder / (name + ".gz" if packed else name)).write_bytes(gzip.compress(body) if packed else body)
    return folder


def write_npz(path, arrays):
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **arrays)
    return path


def delta(x):
    """Code (n, H, W, 3) as differences along rows and columns of G, R - G, B - G."""
    planes = x.transpose(3, 0, 1, 2)[[1, 0, 2]].copy()
    planes[1:] -= planes[0]
    for axis in (2, 3):
        planes = np.diff(planes, axis=axis, prepend=np.zeros_like(planes.take([0], axis)))
    return planes


def write_delta(folder, cut=30):
    folder.mkdir(parents=True, exist_ok=True)
    for name, x, y in (
        ("cifar10_train_1", COLOUR["x_train"][:cut], COLOUR["y_train"][:cut]),
        ("cifar10_train_2", COLOUR["x_train"][cut:], COLOUR["y_train"][cut:]),
        ("cifar10_test", COLOUR["x_test"], COLOUR["y_test"]),
    ):
        np.savez_compressed(folder / f"{name}.npz", d=delta(x), y=y)
    return folder


def batch_bytes(x, y, protocol=2):
    data = x.transpose(0, 3, 1, 2).reshape(len(x), 3072)
    return pickle.dumps({b"data": data, b"labels": y.tolist(), b"batch_label": b"a batch"}, protocol=protocol)


def write_batches(folder, protocol=2):
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(5):
        part = slice(10 * i, 10 * i + 10)
        body = batch_bytes(COLOUR["x_train"][part], COLOUR["y_train"][part], protocol)
        (folder / f"data_batch_{i + 1}").write_bytes(body)
    (folder / "test_batch").write_bytes(batch_bytes(COLOUR["x_test"], COLOUR["y_test"], protocol))
    return folder


def same(dataset, arrays):
    return all(np.array_equal(getattr(dataset, key), value) for key, value in arrays.items())


# --- formats


@pytest.mark.parametrize("where", ["", "fashion-mnist", "FashionMNIST/raw"])
@pytest.mark.parametrize("packed", [True, False])
def test_idx_files(tmp_path, where, packed):
    write_idx(tmp_path / "d" / where, packed)
    dataset = load_dataset("fashion-mnist", folder=tmp_path / "d")
    assert same(dataset, GREY) and dataset.shape == (28, 28) and dataset.classes == 10
    assert dataset.class_names[9] == "ankle boot" and dataset.y_train.dtype == np.int64


def test_idx_files_of_the_debian_package(tmp_path, monkeypatch):
    monkeypatch.setattr(FashionMnist, "system", str(write_idx(tmp_path / "usr/share/datasets/fashion-mnist")))
    assert same(load_dataset("fashion-mnist"), GREY)
    monkeypatch.undo()
    assert FashionMnist.system == "/usr/share/datasets/fashion-mnist"


@pytest.mark.parametrize(
    ("name", "file", "arrays"),
    [("mnist", "mnist.npz", GREY), ("fashion-mnist", "fashion_mnist.npz", GREY), ("cifar10", "cifar10.npz", COLOUR)],
)
def test_plain_npz(tmp_path, name, file, arrays):
    write_npz(tmp_path / "d" / file, arrays)
    dataset = load_dataset(name, folder=tmp_path / "d")
    assert same(dataset, arrays) and dataset.source.endswith(file)


def test_delta_coded_cifar(tmp_path):
    write_delta(tmp_path / "d")
    assert same(load_dataset("cifar10", folder=tmp_path / "d"), COLOUR)


@pytest.mark.parametrize("protocol", [2, 4])
def test_cifar_python_batches(tmp_path, protocol):
    write_batches(tmp_path / "d" / "cifar-10-batches-py", protocol)
    dataset = load_dataset("cifar10", folder=tmp_path / "d")
    assert same(dataset, COLOUR) and dataset.x_train.flags.c_contiguous and dataset.x_test.flags.c_contiguous


def test_cifar_archive_is_read_without_unpacking(tmp_path):
    folder = write_batches(tmp_path / "made")
    (tmp_path / "d").mkdir()
    with tarfile.open(tmp_path / "d" / "cifar-10-python.tar.gz", "w:gz") as archive:
        for path in sorted(folder.iterdir()):
            archive.add(path, f"cifar-10-batches-py/{path.name}")
    assert same(load_dataset("cifar10", folder=tmp_path / "d"), COLOUR)
    assert [p.name for p in (tmp_path / "d").iterdir()] == ["cifar-10-python.tar.gz"]


# --- folders


def test_order_of_folders(tmp_path, monkeypatch):
    names = ("argument", "environment", "here/data", "data", "cache/fedcohort")
    for i, place in enumerate(names):
        write_npz(tmp_path / place / "mnist.npz", GREY | {"x_test": np.full((10, 28, 28), i, np.uint8)})
    monkeypatch.setenv("FEDCOHORT_DATA", str(tmp_path / "environment"))
    assert load_dataset("mnist", folder=tmp_path / "argument").x_test[0, 0, 0] == 0
    for i, place in enumerate(names[1:], 1):
        assert load_dataset("mnist").x_test[0, 0, 0] == i
        (tmp_path / place / "mnist.npz").unlink()
    with pytest.raises(DataError):
        load_dataset("mnist")


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
def test_a_missing_dataset_lists_every_folder_and_what_to_do(tmp_path, monkeypatch, name):
    monkeypatch.setenv("FEDCOHORT_DATA", str(tmp_path / "environment"))
    with pytest.raises(DataError) as caught:
        load_dataset(name, folder=tmp_path / "argument")
    text = str(caught.value)
    for place in ("argument", "environment", "here/data", "data", "cache/fedcohort"):
        assert f"    {tmp_path / place}\n" in text
    assert "hint: " in text and "download=True" in text
    assert (name == "fashion-mnist") == ("no/such/folder" in text)


def test_a_folder_with_the_name_wins_over_loose_files(tmp_path):
    """Loose idx files may be from MNIST or Fashion-MNIST; those in a folder with the name are right."""
    write_idx(tmp_path / "d")
    other = GREY | {"x_train": 255 - GREY["x_train"]}
    write_idx(tmp_path / "d" / "mnist", arrays=other)
    assert same(load_dataset("mnist", folder=tmp_path / "d"), other)


# --- damage


def truncated(path, keep=0.6):
    body = path.read_bytes()
    path.write_bytes(body[: int(len(body) * keep)])
    return path


def test_truncated_files_are_named(tmp_path):
    write_npz(tmp_path / "npz" / "mnist.npz", GREY)
    write_idx(tmp_path / "gz")
    write_idx(tmp_path / "idx", packed=False)
    write_delta(tmp_path / "delta")
    write_batches(tmp_path / "batches")
    for name, path in (
        ("mnist", tmp_path / "npz" / "mnist.npz"),
        ("mnist", tmp_path / "gz" / "train-images-idx3-ubyte.gz"),
        ("mnist", tmp_path / "idx" / "t10k-labels-idx1-ubyte"),
        ("cifar10", tmp_path / "delta" / "cifar10_train_2.npz"),
        ("cifar10", tmp_path / "batches" / "data_batch_3"),
    ):
        truncated(path)
        with pytest.raises(DataError, match=path.name.replace(".", r"\.")) as caught:
            load_dataset(name, folder=path.parent)
        assert caught.value.hint


@pytest.mark.parametrize("body", [b"", b"not a dataset", b"\x1f\x8b rubbish", b"PK\x03\x04 rubbish", b"\x93NUMPY"])
def test_rubbish_in_any_format_is_a_data_error(tmp_path, body):
    for name, file, rest in (
        ("mnist", "mnist.npz", ()),
        ("mnist", "train-images-idx3-ubyte.gz", IDX[1:]),
        ("cifar10", "cifar-10-python.tar.gz", ()),
        ("cifar10", "data_batch_1", [*(f"data_batch_{i}" for i in range(2, 6)), "test_batch"]),
    ):
        folder = tmp_path / f"{name}-{file.replace('/', '-')}"
        for each in (file, *rest):
            (folder / each).parent.mkdir(parents=True, exist_ok=True)
            (folder / each).write_bytes(body)
        with pytest.raises(DataError, match=str(folder)):
            load_dataset(name, folder=folder)


def test_incomplete_sets(tmp_path):
    write_idx(tmp_path / "idx")
    (tmp_path / "idx" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match="t10k-labels-idx1-ubyte"):
        load_dataset("mnist", folder=tmp_path / "idx")
    write_delta(tmp_path / "delta")
    (tmp_path / "delta" / "cifar10_test.npz").unlink()
    with pytest.raises(DataError, match=r"cifar10_test\.npz"):
        load_dataset("cifar10", folder=tmp_path / "delta")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x_train": np.zeros((20, 27, 28), np.uint8)}, "x_train"),
        ({"x_train": np.zeros((20, 28, 28), np.float32)}, "float32"),
        ({"y_train": np.zeros(19, np.uint8)}, "y_train"),
        ({"y_train": np.zeros(20)}, "y_train"),
        ({"y_test": np.full(10, 10, np.uint8)}, r"0 \.\. 9"),
    ],
)
def test_wrong_shapes_and_labels(tmp_path, change, words):
    path = write_npz(tmp_path / "d" / "mnist.npz", GREY | change)
    with pytest.raises(DataError, match=words) as caught:
        load_dataset("mnist", folder=tmp_path / "d")
    assert str(path) in str(caught.value)


def test_missing_array_and_wrong_idx_header(tmp_path):
    write_npz(tmp_path / "d" / "mnist.npz", {"x_train": GREY["x_train"]})
    with pytest.raises(DataError, match="y_train"):
        load_dataset("mnist", folder=tmp_path / "d")
    write_idx(tmp_path / "e", packed=False)
    labels = tmp_path / "e" / "train-labels-idx1-ubyte"
    labels.write_bytes((tmp_path / "e" / "train-images-idx3-ubyte").read_bytes())
    with pytest.raises(DataError, match=r"00 00 08 03"):
        load_dataset("mnist", folder=tmp_path / "e")
    labels.write_bytes(idx_bytes(GREY["y_train"]) + b"x")
    with pytest.raises(DataError, match="21"):
        load_dataset("mnist", folder=tmp_path / "e")


def test_full_size_data_must_have_their_checksum(tmp_path):
    arrays = {
        "x_train": np.zeros((60_000, 28, 28), np.uint8),
        "y_train": np.zeros(60_000, np.uint8),
        "x_test": GREY["x_test"],
        "y_test": GREY["y_test"],
    }
    write_npz(tmp_path / "d" / "fashion_mnist.npz", arrays)
    with pytest.raises(DataError, match="c59f468a2f672dc8"):
        load_dataset("fashion-mnist", folder=tmp_path / "d")
    assert len(load_dataset("fashion-mnist", folder=tmp_path / "d", check=False).y_train) == 60_000


def test_idx_checksum_is_that_of_the_file():
    import hashlib

    for array in (GREY["x_train"], GREY["y_train"]):
        assert Mnist().digest(array) == hashlib.md5(idx_bytes(array)).hexdigest()
        assert FashionMnist().digest(array) == hashlib.sha256(idx_bytes(array)).hexdigest()


# --- pickles


class _Evil:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.system, (f"touch {self.target}",)


class _Compressed:
    def __reduce__(self):
        import _codecs

        return _codecs.encode, ("bomb", "rot13")


@pytest.mark.parametrize("kind", ["call", "codec", "object"])
def test_a_pickle_that_runs_code_is_an_error(tmp_path, kind):
    folder = write_batches(tmp_path / "d")
    target = tmp_path / "was-run"
    bad = {"call": _Evil(target), "codec": _Compressed(), "object": Dataset}[kind]
    (folder / "data_batch_1").write_bytes(pickle.dumps({b"data": bad, b"labels": []}, protocol=2))
    with pytest.raises(DataError, match=r"it names|codec"):
        load_dataset("cifar10", folder=folder)
    assert not target.exists()


def test_a_pickle_of_something_else(tmp_path):
    folder = write_batches(tmp_path / "d")
    for thing, words in (
        ([1, 2], "table"),
        ({b"data": np.zeros((2, 3072), np.uint8)}, "'labels'"),
        ({b"data": np.zeros((2, 3071), np.uint8), b"labels": [0, 1]}, r"\(n, 3072\)"),
        ({b"data": np.zeros((2, 3072)), b"labels": [0, 1]}, "float64"),
        ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [0]}, r"\(n, 3072\)"),
    ):
        (folder / "data_batch_1").write_bytes(pickle.dumps(thing, protocol=2))
        with pytest.raises(DataError, match=words):
            load_dataset("cifar10", folder=folder)


# --- download


@pytest.fixture
def server(tmp_path):
    """A web server in this process on a loopback port that serves a folder."""
    folder = tmp_path / "web"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(folder))

        def log_message(self, *args):
            pass

    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    yield folder, f"http://127.0.0.1:{running.server_port}"
    running.shutdown()
    running.server_close()
    thread.join()


def md5(body):
    import hashlib

    return f"md5:{hashlib.md5(body).hexdigest()}"


def test_download_is_checked_kept_and_not_repeated(tmp_path, server, monkeypatch):
    folder, url = server
    write_idx(folder)
    resources = tuple(
        Resource(f"{name}.gz", f"{url}/{name}.gz", md5((folder / f"{name}.gz").read_bytes())) for name in IDX
    )
    monkeypatch.setattr(Mnist, "resources", resources)
    with pytest.raises(DataError, match="not found"):
        load_dataset("mnist", folder=tmp_path / "d")
    assert same(load_dataset("mnist", folder=tmp_path / "d", download=True), GREY)
    assert sorted(p.name for p in (tmp_path / "d" / "mnist").iterdir()) == sorted(f"{name}.gz" for name in IDX)
    for path in folder.iterdir():
        path.unlink()
    assert same(load_dataset("mnist", folder=tmp_path / "d", download=True), GREY)
    assert same(load_dataset("mnist", folder=tmp_path / "d"), GREY)


def test_downloads_go_to_the_environments_folder_or_the_cache(tmp_path, monkeypatch):
    assert places.download_folder(None) == tmp_path / "cache" / "fedcohort"
    monkeypatch.setenv("FEDCOHORT_DATA", str(tmp_path / "e"))
    assert places.download_folder(None) == tmp_path / "e"
    assert places.download_folder(tmp_path / "f") == tmp_path / "f"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert places.folders(None)[-1].parts[-2:] == (".cache", "fedcohort")


def test_a_wrong_download_leaves_nothing_behind(tmp_path, server):
    folder, url = server
    (folder / "a").write_bytes(b"something else")
    with pytest.raises(DataError, match="checksum md5:"):
        fetch(Resource("a", f"{url}/a", "md5:" + "0" * 32), tmp_path / "d")
    assert list((tmp_path / "d").iterdir()) == []


def test_no_server_no_page_no_space(tmp_path, server, monkeypatch):
    folder, url = server
    with pytest.raises(DataError, match=r"(Not Found|File not found)"):
        fetch(Resource("b", f"{url}/b", "md5:" + "0" * 32), tmp_path / "d")
    with pytest.raises(DataError, match="online"):
        fetch(Resource("b", "http://127.0.0.1:9/b", "md5:" + "0" * 32), tmp_path / "d")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="written"):
        fetch(Resource("b", f"{url}/b", "md5:" + "0" * 32), tmp_path / "file" / "d")
    (folder / "c").write_bytes(b"c" * 100)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(places.os, "replace", full)
    with pytest.raises(DataError, match="No space left"):
        fetch(Resource("c", f"{url}/c", md5(b"c" * 100)), tmp_path / "d")
    assert list((tmp_path / "d").iterdir()) == []


def test_the_content_of_a_gz_is_checked_however_it_was_packed(tmp_path, server):
    import hashlib

    folder, url = server
    known = f"unpacked-sha256:{hashlib.sha256(b'abc' * 999).hexdigest()}"
    for level in (1, 9):
        (folder / "a.gz").write_bytes(gzip.compress(b"abc" * 999, level))
        assert fetch(Resource("a.gz", f"{url}/a.gz", known), tmp_path / str(level)).is_file()
    for body in (gzip.compress(b"abd" * 999), b"no gz", gzip.compress(b"abc" * 999)[:-9]):
        (folder / "a.gz").write_bytes(body)
        with pytest.raises(DataError, match=f"not {known}"):
            fetch(Resource("a.gz", f"{url}/a.gz", known), tmp_path / "wrong")


def test_a_download_that_unpacks_endlessly_is_an_error(tmp_path, server, monkeypatch):
    folder, url = server
    monkeypatch.setattr(places, "MAX_BLOCKS", 2)
    (folder / "a.gz").write_bytes(gzip.compress(bytes(5 << 20)))
    with pytest.raises(DataError, match="unpacks"):
        fetch(Resource("a.gz", f"{url}/a.gz", "unpacked-sha256:" + "0" * 64), tmp_path / "d")


def test_all_downloads_use_https_and_have_a_checksum():
    resources = [r for name in DATASETS for r in getattr(DATASETS.get(name), "resources", ())]
    assert len(resources) == 9
    for resource in resources:
        assert resource.url.startswith("https://")
        kind, _, known = resource.sum.partition(":")
        assert len(bytes.fromhex(known)) == {"md5": 16, "unpacked-sha256": 32}[kind]
