"""A damaged item in a watched folder is named, and everything else is served as before."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import zipfile
from functools import partial

import numpy as np
import pytest
from fastapi.testclient import TestClient

from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import FedcohortError, InputError
from fedcohort.core.protocol import SELECTORS, RoundReport, RoundRequest
from fedcohort.report.dashboard import watcher as watching
from fedcohort.report.dashboard.app import create_app
from fedcohort.report.dashboard.server import check
from fedcohort.report.dashboard.watcher import UNREADABLE, Watcher
from fedcohort.report.exposition import exposition
from fedcohort.session import Session
from fedcohort.simulate.store.parts import ResultsError, part_bytes, read_part
from fedcohort.simulate.store.results import load

CASES = int(os.environ.get("FEDCOHORT_DAMAGES", "50"))
JUNK = ["null", "[]", "{}", "NaN", "-1", '"x"', "[1e999]", '{"run": 3}', "1e400", "true", "[[[]]]", '{"a": {}}']
KEYS = [
    "runs",
    "state",
    "rounds_done",
    "rounds_total",
    "rounds_per_second",
    "seconds_left",
    "message",
    "id",
    "setting",
    "selector",
    "label",
    "params",
    "federation",
    "format",
    "config",
    "seed",
    "cohort",
    "statuses",
    "accuracy",
]


@pytest.fixture(scope="module")
def pristine(toy, tmp_path_factory):
    """An experiment that runs and a session's journal."""
    folder = tmp_path_factory.mktemp("pristine")
    made = toy.start_experiment(folder / "exp", [toy.Choice("uniform")], seeds=1, rounds=9, clients=8, size=2)
    made.play(4)
    journal(folder / "live.sqlite", "site")
    return folder


def journal(path, name):
    table = ClientTable(names=[f"{name}-{i}" for i in range(6)])
    with Session(SELECTORS.create("uniform"), table, journal=path) as session:
        for _ in range(4):
            cohort = session.ask(RoundRequest(2))
            session.tell(RoundReport(cohort.ticket, cohort.clients))
            session.record(cohort.round, {"accuracy": 0.5})


def watched(pristine, root):
    """A folder with two intact items and two that will be damaged."""
    for name in ("good", "bad"):
        shutil.copytree(pristine / "exp", root / name / "exp")
        shutil.copy(pristine / "live.sqlite", root / name / "live.sqlite")
    return root


def damage(path, rng):
    """Damage a file in one of many ways."""
    data = bytearray(path.read_bytes())
    match int(rng.integers(9)):
        case 0 if data:
            for at in rng.integers(len(data), size=int(rng.integers(1, 9))):
                data[at] ^= 1 << int(rng.integers(8))
        case 1:
            del data[int(rng.integers(len(data) + 1)) :]
        case 2 if data:
            at = int(rng.integers(len(data)))
            data[at : at + 200] = rng.bytes(200)
        case 3:
            data = bytearray(rng.bytes(int(rng.integers(2000))))
        case 4:
            data = bytearray(str(rng.choice(JUNK)).encode())
        case 5:
            path.unlink()
            path.mkdir()
            return
        case 6:
            path.unlink()
            return
        case 7 if path.suffix in (".json", ".jsonl"):
            key, value = str(rng.choice(KEYS)), str(rng.choice(JUNK))
            lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
            at = int(rng.integers(len(lines)))
            parsed = json.loads(lines[at])
            some = parsed[0] if isinstance(parsed, list) else parsed
            some[key] = json.loads(value)
            lines[at] = json.dumps(parsed)
            data = bytearray(("\n".join(lines) + "\n").encode())
        case 8 if path.suffix == ".sqlite":
            _odd_row(path, rng)
            return
    path.write_bytes(bytes(data))


def _odd_row(path, rng):
    """Put something odd into a cell of an otherwise intact journal."""
    with sqlite3.connect(path) as db:
        tables = [row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        table = str(rng.choice([name for name in tables if not name.startswith("sqlite_")]))
        columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
        value = [None, b"\x00\xff", "x", -1, 1e308, float("inf"), 2**62][int(rng.integers(7))]
        try:
            db.execute(f"UPDATE {table} SET {rng.choice(columns)} = ?", (value,))
        except sqlite3.Error:
            db.execute(f"DELETE FROM {table}")
    db.close()


def look_at_everything(watcher):
    """Do what a visitor can do; return the list."""
    watcher.poll()
    watcher.poll()
    lines = {line["id"]: line for line in watcher.overview()["items"]}
    for name, item in watcher.items.items():
        detail = item.detail()
        json.dumps(detail, allow_nan=False)
        for run in [line["id"] for line in detail["table"]][:1]:
            client = "2" if name.endswith("exp") else "site-2"
            for ask in (item.cohort, *(partial(item.why, client=c) for c in (None, client))):
                try:
                    json.dumps(ask(run, 1), allow_nan=False)
                except FedcohortError:
                    assert name.startswith("bad")
    return lines


def test_damage_to_one_item_does_not_affect_the_others(pristine, tmp_path):
    rng = np.random.default_rng(16)
    named = 0
    places = [
        p.relative_to(pristine)
        for p in sorted(pristine.rglob("*"))
        if p.is_file() and not p.name.endswith(("-wal", "-shm", ".lock"))
    ]
    for case in range(CASES):
        root = watched(pristine, tmp_path / str(case))
        place = places[int(rng.integers(len(places)))]
        damage(root / "bad" / place, rng)
        watcher = Watcher(root)
        lines = look_at_everything(watcher)
        text = exposition(watcher.journals())
        assert 'fedcohort_journal_readable{journal="good/live.sqlite"} 1' in text, (case, place)
        for name in ("good/exp", "good/live.sqlite"):
            assert lines[name]["state"] != UNREADABLE, (case, place, lines[name])
            assert watcher.items[name].detail()["sections"], (case, place)
        for name, line in lines.items():
            if line["state"] == UNREADABLE:
                assert name.startswith("bad") and line["message"], (case, place, line)
                named += 1
        shutil.rmtree(root)
    assert named > CASES / 10  # else the damages are too kind to show anything


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes in the file system")
def test_a_pipe_or_a_device_instead_of_a_file_does_not_block(pristine, tmp_path):
    for i, file in enumerate(sorted(p for p in pristine.rglob("*") if p.is_file())):
        root = watched(pristine, tmp_path / str(i))
        place = root / "bad" / file.relative_to(pristine)
        place.unlink(missing_ok=True)
        if i % 2:
            os.mkfifo(place)
        else:
            place.symlink_to("/dev/zero")
        lines = look_at_everything(Watcher(root))
        assert all(lines[name]["state"] != UNREADABLE for name in ("good/exp", "good/live.sqlite"))


def test_the_server_continues_and_names_the_damaged_items(pristine, tmp_path):
    root = watched(pristine, tmp_path / "runs")
    (root / "bad" / "exp" / "status.json").write_text('{"state": "running", "rounds_total": "many"}')
    (root / "bad" / "live.sqlite").write_bytes(b"SQLite format 3\x00" + bytes(500))
    with TestClient(create_app(root), base_url="http://localhost") as client:
        lines = {line["id"]: line for line in client.get("/api/overview").json()["items"]}
        assert lines["bad/exp"]["state"] == UNREADABLE and "damaged" in lines["bad/exp"]["message"]
        assert lines["bad/live.sqlite"]["state"] == UNREADABLE and lines["bad/live.sqlite"]["message"]
        assert lines["good/exp"]["state"] == "running" and lines["good/live.sqlite"]["state"] == "stopped"
        for name in lines:
            assert client.get("/api/detail", params={"item": name}).status_code == 200
        assert 'journal_readable{journal="bad/live.sqlite"} 0' in client.get("/metrics").text


def test_a_repaired_item_is_shown_again(pristine, tmp_path):
    root = watched(pristine, tmp_path / "runs")
    status = root / "bad" / "exp" / "status.json"
    valid = status.read_text()
    status.write_text('{"state": "running", "rounds_total": [1]}')
    watcher = Watcher(root)
    watcher.poll()
    before = watcher.version
    assert watcher.items["bad/exp"].overview()["state"] == UNREADABLE
    status.write_text(valid)
    watcher.poll()
    assert watcher.items["bad/exp"].overview()["state"] == "running" and watcher.version != before


# -- sizes are judged before reading --------------------------------------------------------------------------------


def bomb(path, shape, said=None, claims=None):
    """An archive whose array of zeros unpacks to far more than the file, or claims to."""
    header = b"\x93NUMPY\x01\x00"
    body = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {said or shape}, }}".encode()
    body += b" " * (-(len(body) + 11) % 64) + b"\n"
    zeros = bytes(1 << 20)
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("sizes.npy", "w", force_zip64=True) as file,
    ):
        file.write(header + len(body).to_bytes(2, "little") + body)
        for _ in range(shape[0] >> 20):
            file.write(zeros)
        file.close()
        if claims is not None:
            archive.infolist()[0].file_size = claims


def federation_file(folder):
    return next(folder.glob("federation-*.npz"))


def test_a_federation_that_unpacks_to_gigabytes_is_refused_without_reading_it(pristine, tmp_path, monkeypatch):
    folder = shutil.copytree(pristine / "exp", tmp_path / "exp")
    bomb(federation_file(folder), (1 << 20,), said=(3 << 30,), claims=3 << 30)
    monkeypatch.setattr(np, "load", lambda *_, **__: pytest.fail("it was read"))
    results = load(folder)
    with pytest.raises(ResultsError, match=r"3 GiB.* 2"):
        results.federation(results.runs[0])
    with pytest.raises(ResultsError, match="damaged"):
        results.client_count(results.runs[0])


def test_a_header_that_claims_too_much_allocates_nothing(pristine, tmp_path, monkeypatch):
    folder = shutil.copytree(pristine / "exp", tmp_path / "exp")
    bomb(federation_file(folder), (1 << 20,), said=(1 << 50,))
    monkeypatch.setattr(np, "load", lambda *_, **__: pytest.fail("it was read"))
    results = load(folder)
    with pytest.raises(ResultsError, match="1125899906842624"):
        results.federation(results.runs[0])


def test_a_key_cannot_point_outside_the_experiment(pristine, tmp_path):
    folder = shutil.copytree(pristine / "exp", tmp_path / "exp")
    runs = json.loads((folder / "runs.json").read_text())
    runs[0]["federation"] = "/../../../etc/x"
    (folder / "runs.json").write_text(json.dumps(runs))
    results = load(folder)
    with pytest.raises(ResultsError, match="called"):
        results.federation(results.runs[0])


# -- links ----------------------------------------------------------------------------------------------------------


def test_a_link_to_the_root_of_the_disk_is_refused(tmp_path):
    link = tmp_path / "results"
    link.symlink_to("/")
    with pytest.raises(InputError, match="root"):
        check(link, "127.0.0.1", None)
    with pytest.raises(ResultsError, match="experiment"):
        load(link)


def test_links_below_the_watched_folder_lead_only_to_experiments(pristine, tmp_path, monkeypatch):
    root = tmp_path / "runs"
    root.mkdir()
    (root / "disk").symlink_to("/")
    (root / "loop").symlink_to(root)
    (root / "linked").symlink_to(pristine / "exp")
    looked = []
    listed = type(root).iterdir
    monkeypatch.setattr(type(root), "iterdir", lambda self: looked.append(self) or listed(self))
    watcher = Watcher(root)
    watcher.poll()
    assert list(watcher.items) == ["linked"] and root / "disk" not in looked and root / "loop" not in looked


def test_the_search_of_a_folder_with_too_many_folders_is_limited_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(watching, "MAX_FOLDERS", 5)
    for i in range(9):
        (tmp_path / f"f{i}").mkdir()
    watcher = Watcher(tmp_path)
    watcher.poll()
    assert "Only the first 5 folders" in watcher.overview()["note"]


def test_a_part_that_unpacks_to_gigabytes_is_refused(tmp_path):
    pa = pytest.importorskip("pyarrow")
    zeros = pa.array(np.zeros(1 << 20))
    (tmp_path / "part-00000.parquet").write_bytes(part_bytes(pa.table({"loss": pa.chunked_array([zeros] * 300)})))
    with pytest.raises(ResultsError, match=r"2\.34 GiB"):
        read_part(tmp_path / "part-00000.parquet")
