"""A custom signal: declared here, required by a selector, reported, recorded and read again."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from fedcohort import Cohort, Selector, Session, Signal, per_client
from fedcohort.audit.choices import audit_journal
from fedcohort.core.errors import InputError, SignalError
from fedcohort.core.protocol import RoundReport
from fedcohort.core.signals import Known
from fedcohort.journal import read_journal
from fedcohort.journal.maintenance import tables
from fedcohort.testing import ScriptedHost, check_selector

DRAIN = Signal("battery-drain", meaning="percent of the battery that the round took")
MOOD = Signal("mood", meaning="two numbers nobody understands", width=2)


@dataclass(frozen=True)
class DrainState:
    drain: np.ndarray[Any, Any] = per_client()


@dataclass(frozen=True, kw_only=True)
class Gentle(Selector[DrainState]):
    """Picks the clients whose batteries lost least."""

    name = "gentle"
    starves = "those whose batteries suffer"

    @property
    def requires(self) -> frozenset[Signal]:
        return frozenset({DRAIN, MOOD})

    def init(self, clients: Any, rng: Any) -> DrainState:
        return DrainState(np.zeros(clients.n))

    def select(self, state: DrainState, slate: Any, answer: Any, rng: np.random.Generator) -> Any:
        drain = state.drain[slate.candidates]
        order = np.lexsort((rng.random(len(drain)), drain))
        return Cohort(slate.candidates[order[: slate.size]], candidates=slate.candidates, score=-drain), state

    def update(self, state: DrainState, outcome: Any) -> DrainState:
        assert outcome[MOOD].shape == (len(outcome.clients), 2)
        drain = state.drain.copy()
        drain[outcome.clients[outcome.ok]] = outcome[DRAIN][outcome.ok]
        return DrainState(drain)


def numbers(cohort: Cohort) -> dict[str, Any]:
    return {"battery_drain": 5.0 + cohort.clients, "mood": np.ones((cohort.size, 2))}


def test_a_session_with_a_custom_signal_continues_from_its_journal(tmp_path):
    path = tmp_path / "j.sqlite"
    with Session(Gentle(), 6, seed=2, signals=[DRAIN, "mood"], journal=path, audit=True) as session:
        assert session.requires == {DRAIN, MOOD}
        for _ in range(2):
            cohort = session.ask(2)
            session.tell(cohort, **numbers(cohort))
        state = session.state
    with Session.open(path, Gentle()) as session:
        assert session.state.drain.tolist() == state.drain.tolist()
        cohort = session.ask(2)
        metrics = {DRAIN: 5.0 + cohort.clients, "mood": [[1, 2]] * cohort.size}
        session.tell(RoundReport(cohort.ticket, cohort.clients, metrics=metrics))
        assert session.round == 3 and (session.state.drain > 0).all()
    journal = read_journal(path)
    assert {reply.client: reply.metrics["battery-drain"] for reply in journal.replies(0)} == {
        client: 5.0 + client for client in journal.cohorts()[0].clients.tolist()
    }
    assert "battery-drain" in tables(journal)["replies"]
    journal.close()
    result = audit_journal(path, Gentle())
    assert result.problem is None and result.rounds == 3


def test_a_missing_signal_is_named():
    with pytest.raises(SignalError, match="'battery-drain'"):
        Session(Gentle(), 6, signals=["loss"])
    session = Session(Gentle(), 6)
    cohort = session.ask(2)
    with pytest.raises(SignalError, match="'battery-drain'"):
        session.tell(cohort, mood=np.ones((2, 2)))
    with pytest.raises(InputError, match="'battery-drian'") as caught:
        session.tell(cohort, battery_drian=[1, 2], mood=np.ones((2, 2)))
    assert "did you mean 'battery-drain'?" in str(caught.value)
    session.tell(cohort, **numbers(cohort))
    assert session.round == 1


def test_a_shadow_may_have_a_custom_signal():
    session = Session("uniform", 6, shadows={"gentle": Gentle()})
    for _ in range(2):
        cohort = session.ask(2)
        session.tell(cohort, **numbers(cohort))
    assert isinstance(session.explain(1).shadows["gentle"], tuple) and set(session.shadows) == {"gentle"}


def test_a_selector_with_a_custom_signal_conforms():
    assert DRAIN in ScriptedHost().signals
    check_selector(Gentle(), skip={"documentation": "it is no paper's"})


def test_a_signal_is_declared_once():
    assert Signal("battery-drain", meaning=DRAIN.meaning) == DRAIN
    with pytest.raises(InputError):
        Signal("battery-drain", meaning="something else")
    with pytest.raises(InputError):
        Signal("loss", meaning="what I call a loss")
    for name in ("", "Loss", "two words", "under_score", 3, None):
        with pytest.raises(InputError):
            Signal(name, meaning="x")
    with pytest.raises(InputError):
        Signal("odd-width", meaning="x", width=0)
    assert DRAIN in Signal.all() and Signal.by_name("battery-drain") == DRAIN and DRAIN.known is Known.REPORT
    assert repr(DRAIN) == "Signal('battery-drain')"


def test_a_signal_can_be_pickled_to_another_process(tmp_path):
    (tmp_path / "sent").write_bytes(pickle.dumps([DRAIN, Signal.LOSS]))
    code = (
        "import pickle, pathlib; from fedcohort import Signal\n"
        "own, loss = pickle.loads(pathlib.Path('sent').read_bytes())\n"
        "assert own.name == 'battery-drain' and own.meaning.startswith('percent') and loss == Signal.LOSS"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def test_a_journal_with_a_signal_nobody_declared_is_refused_with_a_hint(tmp_path):
    path = tmp_path / "j.sqlite"
    with Session("uniform", 6, signals=[DRAIN], journal=path):
        pass
    code = f"from fedcohort import Session; Session.open({str(path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode and "'battery-drain'" in done.stderr and "import the module that declares it" in done.stderr
