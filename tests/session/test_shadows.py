"""Shadows: those that fail are dropped, those that lack a signal wait, and none disturbs the session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedcohort import ClientTable, Session, create

TABLE = ClientTable(names=["anna", "ben", "cem", "dora"], sizes=[1, 2, 3, 4])


class Raises(type(create("uniform"))):  # type: ignore[misc]
    """A selector whose methods all fail."""

    def select(self, *_: Any) -> Any:
        raise ZeroDivisionError("select")


class Forgets(type(create("uniform"))):  # type: ignore[misc]
    """A selector that chooses, but cannot learn or grow."""

    def update(self, *_: Any) -> Any:
        raise ZeroDivisionError("update")

    def grow(self, *_: Any) -> Any:
        raise ZeroDivisionError("grow")


def test_shadows_dropped_at_opening_leave_the_others_on_record(tmp_path: Path) -> None:
    three = {name: create("uniform") for name in ("a", "b", "c")}
    with Session(create("uniform"), TABLE, journal=tmp_path / "j", shadows=three):
        pass
    with Session.open(tmp_path / "j", shadows={name: three[name] for name in ("b", "c")}) as session:
        assert set(session.shadows) == {"b", "c"}
    with Session.open(tmp_path / "j") as session:
        assert set(session.shadows) == {"b", "c"}


def test_shadows_that_fail_are_dropped_and_the_others_go_on(tmp_path: Path) -> None:
    shadows = {"x": Raises(), "y": Raises(), "late": Forgets(), "good": create("uniform")}
    with Session(create("uniform"), TABLE, journal=tmp_path / "j", shadows=shadows) as session:
        cohort = session.ask(2)
        assert set(session.shadows) == set(session.journal.meta()["shadows"]) == {"late", "good"}
        assert session.journal.scores(cohort.ticket)["x"][2] == "failed: select"
        session.tell(cohort)
        assert set(session.shadows) == {"good"}
        reasons = {body["name"]: body["reason"] for body in session.journal.events("shadow")}
        assert reasons == {"x": "failed: select", "y": "failed: select", "late": "failed: update"}


def test_a_shadow_that_cannot_grow_keeps_no_client_out(tmp_path: Path) -> None:
    with Session("uniform", TABLE, journal=tmp_path / "j", shadows={"bad": Forgets()}) as session:
        session.join(ClientTable(names=["eva"], sizes=[5]))
        assert session.table.n == 5 and not session.shadows


def test_a_shadow_without_its_signals_is_blind_until_it_learns_again(tmp_path: Path) -> None:
    with Session("uniform", TABLE, journal=tmp_path / "j", shadows={"oort": "oort"}) as session:
        session.tell(session.ask(2))
        assert "loss-rms" in session.journal.meta()["blind"]["oort"]
        cohort = session.ask(2)
        picked, _, note = session.journal.scores(cohort.ticket)["oort"]
        assert not len(picked) and "loss-rms" in str(note)
        session.tell(cohort, loss_rms=[1.0, 2.0], duration=[1.0, 1.0])
        assert not session.journal.meta()["blind"]
        assert len(session.journal.scores(session.ask(2).ticket)["oort"][0]) == 2
