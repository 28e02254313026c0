"""Journals from others, and folders that others can write to: memory is limited, no code runs, no link is followed."""

from __future__ import annotations

import base64
import json
import resource
import sqlite3
import subprocess
import sys
import zlib
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedcohort import ClientTable, Session, create
from fedcohort.audit.verification import examine
from fedcohort.cli.app import app
from fedcohort.core.errors import JournalError
from fedcohort.core.protocol import SELECTORS, RoundReport, RoundRequest
from fedcohort.journal import Journal, read_journal
from fedcohort.journal.codec import compress, decompress, pack
from fedcohort.session.explain import explain_round
from fedcohort.simulate.store.live import LiveFeed
from fedcohort.simulate.store.parts import ResultsError
from fedcohort.simulate.store.writer import lock_folder, write_atomically
from tests.forge import forge

NAMES = ["anna", "ben", "cem", "dora"]


def played(path: Path, rules: object = None, **more: object) -> Path:
    with Session(create("uniform"), ClientTable(names=NAMES), seed=1, journal=path, **more) as session:
        for _ in range(3):
            cohort = session.ask(RoundRequest(2, available=[0, 1, 2]))
            session.tell(RoundReport(cohort.ticket, cohort.clients))
    return path


def bomb(size: int) -> bytes:
    packer = zlib.compressobj(9)
    block = b" " * (1 << 20)
    return b"".join([packer.compress(b"["), *(packer.compress(block) for _ in range(size >> 20)), packer.flush()])


@pytest.mark.parametrize(
    ("fact", "data"),
    [
        ("names", 1 << 29),
        ("attributes", 1 << 29),
        ("n", b"2000000000"),  # the mask of members has four bits
    ],
)
def test_a_small_journal_does_not_take_the_memory(tmp_path: Path, fact: str, data: bytes | int) -> None:
    data = bomb(data) if isinstance(data, int) else data
    path = forge(played(tmp_path / "j"), ("INSERT OR REPLACE INTO facts VALUES (x'', ?, ?)", (fact, data)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    read = Journal.attributes if fact == "attributes" else partial(explain_round, round_=0, client="anna")
    with (
        closing(read_journal(path)) as journal,
        pytest.raises(JournalError, match=r"bytes allowed after unpacking|members has room for"),
    ):
        read(journal)
    found = examine(path)
    assert not found.valid
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KiB


def test_lists_of_candidates_and_of_the_excluded_have_the_length_of_the_federation(tmp_path: Path) -> None:
    path = forge(played(tmp_path / "j"), ("UPDATE candidates SET data = ? WHERE ticket = 1", (bomb(64 << 20),)))
    with closing(read_journal(path)) as journal, pytest.raises(JournalError, match="ticket 1"):
        journal.candidates(1, 4)


def codes(data: bytes) -> str:
    return json.dumps({"ticket": 1, "reasons": ["blocked"], "codes": base64.b64encode(data).decode()})


def version(**facts: bytes) -> bytes:
    all_facts = {"active": pack(np.packbits(np.ones(4, np.bool_))), "n": b"4", **facts}
    header = json.dumps([list(all_facts), [[name, len(data)] for name, data in all_facts.items()]])
    return header.encode() + b"\n" + b"".join(all_facts.values())


@pytest.mark.parametrize("replay", ["--replay", "--no-replay"])
@pytest.mark.parametrize("audit", [False, True], ids=["plain", "chained"])
@pytest.mark.parametrize(
    ("statement", "data"),
    [
        ("UPDATE candidates SET data = ? WHERE ticket = 1", bomb(64 << 20)),
        ("UPDATE candidates SET data = ? WHERE ticket = 1", b"no list"),
        ("UPDATE cohorts SET clients = ? WHERE ticket = 1", b'["S300000000", [1], "|u1"]\nx'),
        ("UPDATE replies SET data = ? WHERE ticket = 1", b"r1 1 <u1 = = =loss:900000000\n" + bytes(99)),
        ("UPDATE replies SET data = ? WHERE ticket = 1", b"r1"),
        ("INSERT INTO scores VALUES (x'', 1, '', x'', ?, NULL)", b"s2\n" + bomb(64 << 20)),
        ("INSERT INTO states VALUES (x'', 'shadow', 'field', NULL, ?)", b"no array"),
        ("INSERT INTO deltas VALUES (x'', 9, 'shadow', 'field', ?)", b"no rows"),
        ("INSERT INTO events VALUES (x'', 99, 1.0, 'excluded', ?)", codes(bomb(64 << 20))),
        ("INSERT INTO events VALUES (x'', 99, 1.0, 'excluded', ?)", codes(b"no codes")),
        ("INSERT INTO events VALUES (x'', 99, 1.0, 'mine', ?)", "no body"),
        ("INSERT INTO answers VALUES (x'', 1, ?)", b"no answer"),
        ("INSERT INTO versions VALUES (x'', 99, ?)", b"no version"),
        ("INSERT INTO versions VALUES (x'', 99, ?)", version(names=bomb(64 << 20))),
    ],
)
def test_what_cannot_be_read_is_damage(
    tmp_path: Path, statement: str, data: bytes | str, audit: bool, replay: str
) -> None:
    path = played(tmp_path / "j", audit=audit)
    assert examine(path).valid
    forge(path, (statement, (data,)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    done = CliRunner().invoke(app, ["journal", "verify", str(path), replay])
    assert done.exit_code == 1 and "contents WRONG" in done.output, done.output
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


@pytest.mark.slow
def test_a_million_clients_are_no_bomb(tmp_path: Path) -> None:
    names = [f"hospital-north-east-department-of-cardiology-{i:07d}" for i in range(1_000_000)]
    packed = compress(json.dumps(names).encode())
    facts = {"names": packed, "n": b"1000000", "active": pack(np.packbits(np.ones(1_000_000, np.bool_)))}
    said = compress(json.dumps({name: {"region": "north", "battery": 80} for name in names}).encode())
    changes = [
        ("INSERT OR REPLACE INTO facts VALUES (x'', ?, ?)", pair) for pair in {**facts, "attributes": said}.items()
    ]
    mask = compress(np.packbits(np.ones(1_000_000, np.bool_)).tobytes())
    changes.append(("UPDATE candidates SET data = ? WHERE ticket = 0", (mask,)))
    path = forge(played(tmp_path / "j"), *changes)
    with closing(read_journal(path)) as journal:
        assert journal.table()[0].names[-1] == names[-1] and len(journal.attributes()) == 1_000_000
        assert len(journal.candidates(0, 1_000_000)) == 1_000_000


@pytest.mark.parametrize("data", [b"", b"x", zlib.compress(b"abc")[:-3]])
def test_what_was_cut_off_is_named(data: bytes) -> None:
    with pytest.raises(JournalError, match="unpacked"):
        decompress(data, 100, "A list")
    assert decompress(compress(b"abc"), 3, "A list") == b"abc"


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE VIEW odd AS SELECT 1",
        "CREATE TRIGGER odd AFTER INSERT ON events BEGIN DELETE FROM metrics; END",
        "CREATE TABLE odd (a, b AS (zeroblob(1000000000)))",
    ],
)
def test_what_would_be_computed_while_it_is_read_is_refused(tmp_path: Path, statement: str) -> None:
    path = played(tmp_path / "j")
    with sqlite3.connect(path) as db:
        db.execute(statement)
    with pytest.raises(JournalError, match=r"'odd'.*no journal has"):
        read_journal(path)


# -- links ------------------------------------------------------------------------------------------------------------


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("mine")
    (tmp_path / "j.lock").symlink_to(secret)
    with pytest.raises(JournalError, match="symbolic link"):
        played(tmp_path / "j")
    assert not (tmp_path / "j").exists()
    out = tmp_path / "out"
    out.mkdir()
    for name in ("live.sqlite", "live.sqlite-wal", ".lock", "runs.json"):
        (out / name).symlink_to(secret)
    with LiveFeed(out, {}):  # replaces the links
        assert not (out / "live.sqlite").is_symlink() and not (out / "live.sqlite-wal").is_symlink()
    with pytest.raises(ResultsError, match="symbolic link"), lock_folder(out):
        pass
    write_atomically(out / "runs.json", b"{}")  # replaces the link
    assert not (out / "runs.json").is_symlink()
    assert secret.read_text() == "mine"


# -- code -------------------------------------------------------------------------------------------------------------

EVIL = """
from dataclasses import dataclass
from pathlib import Path
from fedcohort.selectors import FedACS

Path(__file__).with_name("it-ran").write_text("it ran")


@dataclass(frozen=True, kw_only=True)
class Evil(FedACS):
    'Runs when it is imported.'
"""


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    """A journal that names a file."""
    spec = {"name": "evil", "class": "evil:Evil", "reference": f"{tmp_path}/evil.py:Evil", "params": {}}
    path = played(tmp_path / "evil.sqlite")
    forge(path, ("UPDATE meta SET value = ? WHERE key = 'selector'", (json.dumps(spec),)))
    (tmp_path / "evil.py").write_text(EVIL)
    return path


@pytest.mark.parametrize(
    "words",
    [
        ["journal", "verify"], ["analytics", "--journal"], ["journal", "forget"], ["journal", "abandon"],
        ["journal", "selector"], ["report"], ["explain", "--round", "0"],
    ],
)  # fmt: skip
def test_no_command_imports_what_a_journal_names(evil: Path, words: list[str]) -> None:
    more = {"forget": ["ben"], "selector": ["uniform"]}.get(words[-1], [])
    done = CliRunner().invoke(
        app, [*words, str(evil), *more, *(["-o", str(evil) + ".html"] if words == ["report"] else [])]
    )
    assert not evil.with_name("it-ran").exists()
    if words[0] not in ("report", "explain"):
        assert f"{evil.with_name('evil.py')}:Evil" in done.output + str(done.exception)
    if words[-1] in ("--journal", "forget", "abandon", "selector"):
        assert "--selector" in str(done.exception)


def test_a_selector_around_another_imports_nothing_either(evil: Path) -> None:
    params = {"of": f"{evil.with_name('evil.py')}:Evil", "params": None, "tail": 0.2, "audit": None}
    spec = {"name": "bounded", "class": "x:Bounded", "reference": None, "params": params}
    forge(evil, ("UPDATE meta SET value = ? WHERE key = 'selector'", (json.dumps(spec),)))
    assert "evil.py:Evil" in {f.check: f.text for f in examine(evil).findings}["replay"]
    with pytest.raises(JournalError, match=r"evil\.py:Evil"):
        Session.open(evil)
    assert not evil.with_name("it-ran").exists()


def test_a_shadow_from_a_file_is_neither_imported_nor_lost(evil: Path) -> None:
    shadow = {
        "s": {"name": "evil", "class": "evil:Evil", "reference": f"{evil.with_name('evil.py')}:Evil", "params": {}}
    }
    own = {"name": "uniform", "class": "x:Uniform", "reference": None, "params": {}}
    forge(
        evil,
        ("UPDATE meta SET value = ? WHERE key = 'selector'", (json.dumps(own),)),
        ("UPDATE meta SET value = ? WHERE key = 'shadows'", (json.dumps(shadow),)),
    )
    with pytest.raises(JournalError, match="the shadow 's'"):
        Session.open(evil)
    with closing(read_journal(evil)) as journal:
        assert journal.meta()["shadows"] == shadow


def test_what_the_caller_names_is_imported(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(EVIL.replace("FedACS", "Uniform").replace("Evil", "Own"))
    code = "from fedcohort import *\ns = Session(create('own.py:Own'), list('abcd'), journal='j'); s.ask(2); s.close()"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    (tmp_path / "it-ran").unlink()
    (tmp_path / "elsewhere").mkdir()
    moved = (tmp_path / "own.py").rename(tmp_path / "elsewhere" / "own.py")
    plain = CliRunner().invoke(app, ["journal", "abandon", str(tmp_path / "j")])
    assert plain.exit_code == 1 and not (moved.with_name("it-ran")).exists()
    done = CliRunner().invoke(app, ["journal", "abandon", str(tmp_path / "j"), "--selector", f"{moved}:Own"])
    assert done.exit_code == 0 and moved.with_name("it-ran").exists(), done.output
    assert SELECTORS.find_imported(f"{tmp_path}/own.py:Own") is not None
