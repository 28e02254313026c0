"""Rules that change during a run: every round is judged by its own rules."""

from __future__ import annotations

import json
import logging
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedcohort.audit.participation import prove_participation
from fedcohort.audit.verification import examine
from fedcohort.cli.app import app
from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import InputError, ParameterError
from fedcohort.core.protocol import RoundReport, RoundRequest
from fedcohort.journal import Journal
from fedcohort.selectors import Uniform
from fedcohort.session import Session
from fedcohort.session.rules import Rules


def played(session: Session, size: int, rounds: int = 1) -> None:
    for _ in range(rounds):
        cohort = session.ask(RoundRequest(size))
        if cohort.size:
            session.tell(RoundReport(cohort.ticket, cohort.clients))


def printed(path: Path, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["journal", "rules", "prove", str(path), *options])
    return result.exit_code, " ".join(result.output.split())


# -- the proof --------------------------------------------------------------------------------------------------------


def test_a_tightened_limit_is_not_reported_as_kept(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with Session(Uniform(), ClientTable(n=3), journal=path, rules=Rules(max_participations=9)) as session:
        played(session, 3, 7)
    with Session.open(path, rules=Rules(max_participations=2)) as session:
        played(session, 3, 2)  # nobody is eligible any more
    proof = prove_participation(path)
    assert proof.kept and not proof.holds and proof.most == 7
    assert [(change.round, change.what) for change in proof.changes] == [
        (0, "max_participations is now 9"),
        (7, "max_participations was 9, is now 2"),
    ]
    code, text = printed(path)
    assert code == 1 and "held" not in text
    assert "Rules set in round 7: max_participations was 9, is now 2." in text
    assert "Client 0: 7 participations, all before the limit of 2 took effect in round 7." in text
    assert "The run as a whole exceeds the limits in force now." in text
    found = json.loads(CliRunner().invoke(app, ["journal", "rules", "prove", str(path), "--format", "json"]).output)
    assert (found["holds"], found["kept"], len(found["changes"]), len(found["exceeded"])) == (False, True, 2, 3)
    finding = next(f for f in examine(path).findings if f.check == "rules")
    assert finding.valid and "7 participations, all before the limit of 2" in finding.text


def test_a_limit_can_be_exceeded_and_broken(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with Session(Uniform(), ClientTable(n=2), journal=path) as session:
        played(session, 2, 7)
    with closing(Journal.open(path)) as journal, journal.event():  # a session would never write this
        journal.add_event("rules", {"round": 5, "ticket": 5, "rules": {"max_participations": 2}})
    proof = prove_participation(path)
    assert sorted((b.client, b.round) for b in proof.breaches) == [("0", 5), ("0", 6), ("1", 5), ("1", 6)]
    assert {e.what for e in proof.exceeded} == {"7 participations, 5 before the limit of 2 took effect in round 5"}
    code, text = printed(path)
    assert code == 1 and text.endswith("The rules did not hold.")


def test_tightened_separation_and_windows(tmp_path: Path) -> None:
    path = tmp_path / "j"
    with Session(Uniform(), ClientTable(n=1), journal=path, rules=Rules(blocked=("x",))) as session:
        played(session, 1, 4)
        session.set_rules(Rules(min_separation=3, window=4, max_in_window=2))
        session.set_rules(Rules(min_separation=3, window=4, max_in_window=2, blocked=("y",)))
        played(session, 1, 8)
    assert {e.what for e in prove_participation(path).exceeded} == {
        "1 rounds from one participation to the next, before the separation of 3 took effect in round 4",
        "4 times in 4 rounds, before the limit of 2 took effect in round 4",
    }


def test_loosened_or_unchanged_rules_hold(tmp_path: Path) -> None:
    with Session(Uniform(), ClientTable(n=2), journal=tmp_path / "j", rules=Rules(max_participations=2)) as session:
        played(session, 2, 2)
        session.set_rules(Rules(max_participations=2))  # no change, so nothing is recorded
        session.set_rules(Rules(max_participations=5))
        played(session, 2, 2)
    proof = prove_participation(tmp_path / "j")
    assert proof.holds and len(proof.changes) == 2
    code, text = printed(tmp_path / "j")
    assert code == 0 and "they changed once. The run as a whole is within those in force now." in text


def test_rules_stay_at_a_restart_unless_they_are_dropped(tmp_path: Path, caplog: Any) -> None:
    path = tmp_path / "j"
    with Session(Uniform(), ClientTable(n=2), journal=path, rules=Rules(max_participations=1)) as session:
        played(session, 2)
    with caplog.at_level(logging.INFO, "fedcohort"):
        with Session.open(path) as session:
            assert session.rules == Rules(max_participations=1)
            assert session.ask(RoundRequest(2)).size == 0
        assert "stay in force: Rules(max_participations=1); rules=Rules() drops them" in caplog.text
        with Session.open(path, rules=Rules()) as session:
            assert session.ask(RoundRequest(2)).size == 2
        assert "max_participations was 1, is now unset" in caplog.text
    assert not prove_participation(path).holds
    code, text = printed(path)
    assert code == 1 and "None have been in force since round 2." in text


def test_empty_rules_prove_nothing(tmp_path: Path) -> None:
    with Session(Uniform(), ClientTable(n=2), journal=tmp_path / "j", rules=Rules()) as session:
        played(session, 2)
    code, text = printed(tmp_path / "j")
    assert code == 1 and "There were no rules: nothing is proved." in text


# -- random changes against the definition ----------------------------------------------------------------------------


def random_rules(rng: np.random.Generator, n: int) -> Rules:
    given: dict[str, Any] = {}
    if rng.random() < 0.3:
        given["blocked"] = (str(rng.integers(n)),)
    if rng.random() < 0.2:
        given["paused"] = {str(rng.integers(n)): int(rng.integers(1, 12))}
    if rng.random() < 0.5:
        given["min_separation"] = int(rng.integers(1, 5))
    if rng.random() < 0.5:
        given["max_participations"] = int(rng.integers(1, 8))
    if rng.random() < 0.4:
        given["window"] = int(rng.integers(2, 6))
        given["max_in_window"] = int(rng.integers(1, given["window"] + 1))
    if rng.random() < 0.3:
        given |= {"budget": {"epsilon": 4.0}, "cost": {"epsilon": 0.9}}
    if rng.random() < 0.3:
        given["budgets"] = {str(rng.integers(n)): {"rounds": float(rng.integers(1, 6))}}
    return Rules(**given)


def limit_by_definition(rules: Rules, client: str) -> float:
    budget = {**(rules.budget or {}), **(rules.budgets or {}).get(client, {})}
    cost = {"rounds": 1.0, **(rules.cost or {})}
    bounds = [int(limit / cost[kind]) for kind, limit in budget.items()]
    return min([*bounds, rules.max_participations or np.inf])


def breaks(rules: Rules, client: str, round_: int, past: list[int]) -> bool:
    """Whether taking part in ``round_`` after the rounds of ``past`` breaks the rules, from their definitions."""
    return (
        client in rules.blocked
        or round_ < (rules.paused or {}).get(client, 0)
        or any(round_ - p < rules.min_separation for p in past)
        or len(past) + 1 > limit_by_definition(rules, client)
        or (rules.max_in_window is not None and sum(round_ - p < rules.window for p in past) + 1 > rules.max_in_window)
    )


def exceeds(rules: Rules, client: str, past: list[int]) -> bool:
    """Whether a client's participations exceed the limits; a block only counts for its own rounds."""
    if len(past) > limit_by_definition(rules, client):
        return True
    if any(b - a < rules.min_separation for i, a in enumerate(past) for b in past[i + 1 :]):
        return True
    limit = rules.max_in_window
    return limit is not None and any(sum(last - rules.window < p <= last for p in past) > limit for last in past)


@pytest.mark.parametrize("seed", range(120))
def test_every_round_is_judged_by_the_rules_in_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 5))
    session = Session(Uniform(), ClientTable(n=n), seed=seed)
    told: list[tuple[int, int, list[str]]] = []  # (ticket, round, clients)
    in_force: dict[int, Rules] = {}  # by ticket
    rules: Rules | None = None
    for _ in range(12):
        while rng.random() < 0.3:
            rules = random_rules(rng, n)
            with session.journal.event():
                body = {"round": session.round, "ticket": session.journal.last()[1] + 1, "rules": rules.to_dict()}
                session.journal.add_event("rules", body)
        cohort = session.ask(RoundRequest(int(rng.integers(1, n + 1)), np.flatnonzero(rng.random(n) < 0.7)))
        if not cohort.size:
            continue
        if rules is not None:
            in_force[cohort.ticket] = rules
        if rng.random() < 0.15:
            session.abandon(cohort.ticket, "gone")
        else:
            session.tell(RoundReport(cohort.ticket, cohort.clients))
            told.append((cohort.ticket, cohort.round, list(cohort.names)))
    past: dict[str, list[int]] = {}
    broken = set()
    for ticket, round_, names in told:
        for name in names:
            if ticket in in_force and breaks(in_force[ticket], name, round_, past.get(name, [])):
                broken.add((name, round_))
            past.setdefault(name, []).append(round_)
    proof = prove_participation(session.journal)
    assert {(b.client, b.round) for b in proof.breaches} == broken
    assert proof.kept == (not broken)
    beyond = {name for name in past if rules is not None and exceeds(rules, name, past[name])}
    assert {e.client for e in proof.exceeded} <= beyond
    assert proof.holds == (rules is not None and rules != Rules() and not broken and not beyond)


# -- quotas -----------------------------------------------------------------------------------------------------------


def test_a_client_that_invents_a_value_has_no_claim_to_a_place() -> None:
    table = ClientTable(names=[f"c{i}" for i in range(20)])
    rules = Rules(quotas={"region": {"north": 1, "south": 1}})
    taken = 0
    for seed in range(40):
        session = Session(Uniform(), table, seed=seed, rules=rules)
        session.set_attributes({f"c{i}": {"region": "north" if i < 10 else "south"} for i in range(19)})
        session.set_attributes({"c19": {"region": "atlantis"}})
        cohort = session.ask(RoundRequest(4))
        taken += "c19" in cohort.names
        regions = {"north" if int(name[1:]) < 10 else "south" for name in cohort.names if name != "c19"}
        assert regions == {"north", "south"}
    assert taken < 20  # its fair share is 8


def test_values_are_compared_as_they_are_written() -> None:
    rules = Rules(quotas={"charging": {"true": 1}, "tier": {"3": 1}})
    session = Session(Uniform(), ClientTable(n=30), seed=2, rules=rules)
    session.set_attributes({"4": {"charging": True, "tier": 1}, "5": {"charging": False, "tier": 3}})
    assert {"4", "5"} <= set(session.ask(RoundRequest(2)).names)


def test_an_unfilled_quota_is_recorded() -> None:
    session = Session(Uniform(), ClientTable(n=3), rules=Rules(quotas={"region": {"north": 2}}))
    session.set_attributes({"1": {"region": "north"}})
    assert session.ask(RoundRequest(2)).notes["quota not met"] == "region north: 1 of 2"


def test_a_client_cannot_override_its_size_in_the_table() -> None:
    session = Session(Uniform(), ClientTable(sizes=[5, 500]), rules=Rules(eligible="size >= 100"))
    session.set_attributes({"0": {"size": 1_000_000}})
    assert session.ask(RoundRequest(2)).names == ("1",)


def test_quotas_must_name_their_values() -> None:
    for quotas in ({"region": 2}, {"region": {"north": 0}}, {"region": ["north"]}):
        with pytest.raises(ParameterError):
            Rules(quotas=quotas)  # type: ignore[arg-type]


# -- infeasible rules -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (Rules(min_separation=5), r"any 5 rounds in a row need 3 x 5 = 15 different clients.* 8 clients"),
        (
            Rules(min_separation=3, blocked=("0",)),
            r"need 3 x 3 = 9 different clients.* 7 clients",
        ),
        (Rules(window=10, max_in_window=3), r"need 3 x 10 = 30 participations, .* the 8 clients have 8 x 3 = 24"),
        (Rules(pinned=("0", "1", "2", "3")), "pin 4 clients.* 3"),
        (Rules(quotas={"region": {"n": 2, "s": 2}}), "quotas of 'region' claim 4 places.* 3"),
    ],
)
def test_infeasible_rules_are_refused_with_the_arithmetic(rules: Rules, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        rules.check_feasible([str(c) for c in range(8)], 3, 100)


def test_barely_feasible_rules_are_accepted() -> None:
    names = [str(c) for c in range(9)]
    Rules(min_separation=3, pinned=("0", "1", "2"), quotas={"region": {"n": 1, "s": 2}}).check_feasible(names, 3, 100)
    Rules(window=3, max_in_window=1).check_feasible(names, 3, 100)
    Rules(min_separation=50).check_feasible(names, 3, 3)  # the run ends before any client is asked twice
    with pytest.raises(ParameterError, match=r"2 participations in 4 rounds.* 1 "):
        Rules(window=4, min_in_window=2, min_separation=4)


@pytest.mark.parametrize("seed", range(30))
def test_feasible_means_that_every_cohort_is_filled(seed: int) -> None:
    """If all clients are always available, cohorts with a separation are full exactly when the arithmetic says so."""
    rng = np.random.default_rng(seed)
    n, size, apart = int(rng.integers(2, 12)), int(rng.integers(1, 4)), int(rng.integers(1, 6))
    size = min(size, n)
    rules = Rules(min_separation=apart)
    session = Session(Uniform(), ClientTable(n=n), seed=seed, rules=rules)
    filled = True
    for _ in range(15):
        cohort = session.ask(RoundRequest(size))
        filled &= cohort.size == size
        if cohort.size:
            session.tell(RoundReport(cohort.ticket, cohort.clients))
    try:
        rules.check_feasible(map(str, range(n)), size, 15)
        feasible = True
    except ParameterError:
        feasible = False
    assert feasible == filled


def test_shortages_are_counted_with_what_was_spent() -> None:
    spent = {"a": 0, "b": 2, "c": 5}
    assert not Rules(max_participations=4).shortages(spent, 2, 3)
    (short,) = Rules(max_participations=4).shortages(spent, 2, 4)
    assert [int(number) for number in re.findall(r"\d+", short)] == [
        4,
        2,
        8,
        3,
        6,
    ]  # rounds of 2 need 8, 3 clients have 6
    assert not Rules(budgets={"a": {"rounds": 1}}).shortages(spent, 2, 400)  # the others have no limit
    (short,) = Rules(window=2, min_in_window=1).shortages(spent, 1, 9)
    assert "3 places" in short and "1 x 2 = 2" in short


def test_the_simulator_refuses_infeasible_rules(tmp_path: Path) -> None:
    from tests.experiments import run_experiment

    table = {
        "seeds": [1],
        "run": {"rounds": 9, "cohort": 2},
        "scenario": {"partition": {"name": "dirichlet", "clients": 8, "alpha": 0.5}},
        "rules": {"max_participations": 2},
        "selectors": {"uniform": {}},
    }
    with pytest.raises(InputError, match=r"18 participations.*\b16\b"):
        run_experiment(table, tmp_path / "x")
    table["rules"] = {"min_separation": 5}
    with pytest.raises(ParameterError, match=r"2 x 5 = 10 .* 8\b"):
        run_experiment(table, tmp_path / "x")
