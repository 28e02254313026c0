"""Journals of fedcohort 0.2 are refused and left as they were; those of format 4 are read and continued."""

from __future__ import annotations

import gzip
import json
import pkgutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedcohort import Session, Signal, Status
from fedcohort.audit import choices
from fedcohort.audit.verification import examine
from fedcohort.core.errors import JournalError
from fedcohort.core.protocol import RoundReport, RoundRequest
from fedcohort.journal import SCHEMA_VERSION, read_journal
from fedcohort.journal.decisions import Decisions

FOLDER = Path(__file__).parent
FORMAT_4 = json.loads(gzip.decompress((FOLDER / "version-4" / "expected.json.gz").read_bytes()))
WAYS: dict[str, Callable[[Path], Any]] = {
    "continue": Session.open,
    "continue or create": lambda path: Session.open_or_create(path, "balanced", 10),
    "read": read_journal,
    "read rounds": lambda path: Decisions(path, path.parent).cohorts,
    "verify": examine,
    "audit": choices.audit_journal,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_journal_of_0_2_is_refused_and_left_as_it_was(tmp_path: Path, way: str) -> None:
    path = tmp_path / "balanced.sqlite"
    before = gzip.decompress((FOLDER / "version-0.2" / "balanced.sqlite.gz").read_bytes())
    path.write_bytes(before)
    with pytest.raises(JournalError, match=rf"format 3\b.*format {SCHEMA_VERSION}\b") as refused:
        WAYS[way](path)
    assert "the version of fedcohort that wrote it" in str(refused.value.hint)
    assert path.read_bytes() == before


# -- format 4 ---------------------------------------------------------------------------------------------------------


def unpacked(name: str, folder: Path) -> Path:
    """A journal that the code of then wrote, with the files next to it."""
    for file in (FOLDER / "version-4").glob(f"{name}.sqlite*.gz"):
        (folder / file.name.removesuffix(".gz")).write_bytes(gzip.decompress(file.read_bytes()))
    return folder / f"{name}.sqlite"


def contents(path: Path) -> dict[str, Any]:
    """Everything that can be read from a journal, as JSON."""

    def plain(value: Any) -> Any:
        return value.tolist() if isinstance(value, np.ndarray) else value

    with closing(read_journal(path)) as journal:
        rows = journal.cohorts()
        table, active = journal.table()
        meta = journal.meta()
        return json.loads(json.dumps({
            "meta": {k: meta[k] for k in ("seed", "selector", "shadows", "signals", "rules", "host", "created")},
            "state": {n: {k: plain(v) for k, v in journal.state(n).items()} for n in ("", *meta["shadows"])},
            "cohorts": [
                [r.ticket, r.round, r.asked_at, r.told_at, r.wanted, r.n_candidates, plain(r.clients), r.notes, r.stop]
                for r in rows
            ],
            "scores": [
                {k: [p.tolist(), {a: v.tolist() for a, v in arrays.items()}, note]
                 for k, (p, arrays, note) in journal.scores(r.ticket).items()}
                for r in rows
            ],
            "replies": [[r.ticket, r.client, r.status, r.kept, r.late, r.at, r.metrics] for r in journal.replies()],
            "candidates": [plain(journal.candidates(r.ticket, table.n)) for r in rows],
            "exclusions": [journal.exclusions(r.ticket) for r in rows],
            "names": table.names, "sizes": table.sizes.tolist(), "active": active.tolist(),
            "attributes": journal.attributes(), "metrics": journal.metrics(),
            "events": [[kind, journal.events(kind)] for kind in dict(FORMAT_4["closed"]["events"])],
        }))  # fmt: skip


def a_round(session: Session) -> list[str]:
    """One round as the journals were written."""
    cohort = session.ask(RoundRequest(size=3))
    loss = 1.0 + cohort.clients + 0.25 * cohort.round
    status = [Status.FAILED if i == cohort.round % 5 else Status.OK for i in range(cohort.size)]
    session.tell(RoundReport(cohort.ticket, cohort.clients, status, {Signal.LOSS: loss}), host={"model": cohort.round})
    return list(cohort.names)


@pytest.mark.parametrize("name", ["closed", "killed", "audited"])
def test_a_journal_of_format_4_reads_as_it_did(tmp_path: Path, name: str) -> None:
    path, expected = unpacked(name, tmp_path), dict(FORMAT_4[name])
    before = path.read_bytes()
    found = contents(path)
    expected["meta"] = {key: expected["meta"][key] for key in found["meta"]}
    expected["events"] = [[kind, [b for k, b in expected["events"] if k == kind]] for kind, _ in found["events"]]
    assert found == {key: expected[key] for key in found}
    assert examine(path).valid and path.read_bytes() == before


@pytest.mark.parametrize("name", ["closed", "killed"])
def test_a_journal_of_format_4_is_continued_with_the_same_cohorts(tmp_path: Path, name: str) -> None:
    path = unpacked(name, tmp_path)
    with Session.open(path) as session:
        assert [a_round(session) for _ in range(2)] == FORMAT_4[name]["following"]
    assert examine(path).valid
    assert contents(path)["replies"][: len(FORMAT_4[name]["replies"])] == FORMAT_4[name]["replies"]


def test_damage_of_a_journal_of_format_4_is_found(tmp_path: Path) -> None:
    """It must be found before the journal is converted, which would hide it."""
    path = unpacked("killed", tmp_path)
    wal = path.with_name(f"{path.name}-wal")
    wal.write_bytes(wal.read_bytes()[: wal.stat().st_size // 2])
    for opened in (read_journal, Session.open):
        with pytest.raises(JournalError):
            opened(path)
    path = unpacked("closed", tmp_path)
    data = path.read_bytes()
    at = data.rfind(b"the power failed")
    path.write_bytes(data[:at] + b"T" + data[at + 1 :])
    for opened in (read_journal, Session.open):
        with pytest.raises(JournalError):
            opened(path)


@pytest.mark.parametrize("call", ["mark", "unlink", "replace"])
def test_a_conversion_that_is_interrupted_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = unpacked("killed", tmp_path)
    target = {"mark": "fedcohort.journal.lock.Lock.mark", "unlink": "pathlib.Path.unlink", "replace": "os.replace"}[
        call
    ]
    module, _, name = target.rpartition(".")
    real = getattr(pkgutil.resolve_name(module), name)

    def interrupted(*arguments: Any, **more: Any) -> None:
        if call != "unlink" or str(arguments[0]).endswith(".sqlite-shm"):
            raise KeyboardInterrupt
        real(*arguments, **more)

    with monkeypatch.context() as killed:
        killed.setattr(target, interrupted)
        with pytest.raises(KeyboardInterrupt):
            Session.open(path)
    with Session.open(path) as session:
        assert [a_round(session) for _ in range(2)] == FORMAT_4["killed"]["following"]
