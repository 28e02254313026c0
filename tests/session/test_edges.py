"""Clients behind edge servers: the edge is part of the name, and rules limit the picks of one edge."""

from __future__ import annotations

import dataclasses
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedcohort.audit.replay import replay_journal
from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import ParameterError
from fedcohort.core.protocol import Cohort, RoundReport, RoundRequest
from fedcohort.journal import read_journal
from fedcohort.selectors import Uniform
from fedcohort.session import Session
from fedcohort.session.rules import Rules

NAMES = [f"edge-{i % 5}/client-{i}" for i in range(30)] + ["alone-1", "alone-2"]


def edges(cohort: Cohort) -> Counter[str]:
    return Counter(name.split("/")[0] for name in cohort.names if "/" in name)


@pytest.mark.parametrize("seed", range(20))
def test_cohorts_keep_the_limit_per_edge_and_are_full_if_possible(seed: int, tmp_path: Path) -> None:
    draw = np.random.default_rng(seed)
    most, size = int(draw.integers(1, 4)), int(draw.integers(2, 12))
    rules = Rules(at_most={"edge": most}, pinned=tuple(draw.choice(NAMES, 2, replace=False).tolist()), min_separation=2)
    last: dict[str, int] = {}
    with Session("uniform", ClientTable(names=NAMES), seed=seed, rules=rules, journal=tmp_path / "j") as session:
        for number in range(15):
            there = np.sort(draw.choice(len(NAMES), int(draw.integers(4, len(NAMES))), replace=False))
            cohort = session.ask(RoundRequest(size, there))
            free = [n for n in np.array(NAMES)[there].tolist() if number - last.get(n, -9) >= 2]
            room = Counter(n.split("/")[0] for n in free if "/" in n)
            places = sum(min(most, count) for count in room.values()) + sum("/" not in n for n in free)
            assert max(edges(cohort).values(), default=0) <= most
            assert cohort.size == min(size, places) and set(cohort.names) <= set(free)
            last.update(dict.fromkeys(cohort.names, number))
            if cohort.size:
                session.tell(RoundReport(cohort.ticket, cohort.clients))
    with closing(read_journal(tmp_path / "j")) as record:
        found = replay_journal(record)
    assert found.possible and found.problem is None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Best(Uniform):
    def select(self, state: Any, slate: Any, answer: Any, rng: Any) -> Any:
        score = slate.candidates.astype(float)
        return Cohort(slate.candidates[::-1][: slate.size], candidates=slate.candidates, score=score), state


def test_the_best_clients_stay_and_the_next_best_fill_the_places() -> None:
    names = ["a/0", "b/1", "a/2", "c/3", "c/4", "c/5"]
    with Session(Best(), ClientTable(names=names), rules=Rules(at_most={"edge": 1})) as session:
        cohort = session.ask(3)
        assert set(cohort.names) == {"c/5", "a/2", "b/1"}
        assert cohort.notes["too many of one value"] == "c/4, c/3"


def test_limits_come_before_quotas_and_hold_for_any_attribute() -> None:
    names = [f"e/{i}" for i in range(4)] + ["f/4", "f/5"]
    rules = Rules(at_most={"edge": 2, "owner": 2}, quotas={"region": {"north": 3}})
    with Session(Best(), ClientTable(names=names), rules=rules) as session:
        session.set_attributes({n: {"region": "north" if n[0] == "e" else "south", "owner": "x"} for n in names[1:]})
        cohort = session.ask(3)
    assert edges(cohort)["e"] <= 2
    assert sum(name in names[1:] for name in cohort.names) <= 2
    assert "quota not met" in cohort.notes


def test_the_edge_comes_from_the_name_whatever_a_client_reports() -> None:
    with Session("all", ClientTable(names=["a/0", "a/1", "2"]), rules=Rules(eligible="edge == 'a'")) as session:
        session.set_attributes({"a/0": {"edge": "b"}})
        assert set(session.ask(None).names) == {"a/0", "a/1"}


def test_edges_that_cannot_fill_a_cohort_are_refused_with_the_arithmetic() -> None:
    with pytest.raises(ParameterError, match=r"of 13\b.* 5 edges and 2 clients .* 12\b"):
        Rules(at_most={"edge": 2}).check_feasible(NAMES, 13, 1)
    Rules(at_most={"edge": 2}).check_feasible(NAMES, 12, 1)
