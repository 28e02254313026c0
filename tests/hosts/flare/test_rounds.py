"""A run on FLARE: rounds, questions, spares, deadlines, rules, restarts."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedcohort.core.errors import FedcohortError
from fedcohort.core.protocol import Status
from fedcohort.hosts.flare import Answers, CohortController
from fedcohort.hosts.leases import Leases
from fedcohort.journal import read_journal
from fedcohort.session.rules import Rules
from fedcohort.session.session import Session
from tests.hosts import own_signals

from .federation import Federation, Pull, cohorts


def sites(count: int = 5, **seconds: float) -> dict[str, Pull]:
    return {f"site-{k}": Pull(seconds.get(f"site_{k}", 0.0)) for k in range(1, count + 1)}


def statuses(journal: Path) -> dict[int, dict[str, Status]]:
    """Return what became of each site, by round."""
    record = read_journal(journal)
    try:
        table, _ = record.table()
        rounds = {row.ticket: row.round for row in record.cohorts()}
        found: dict[int, dict[str, Status]] = {}
        for reply in record.replies():
            found.setdefault(rounds[reply.ticket], {})[table.name(reply.client)] = Status(reply.status)
        return found
    finally:
        record.close()


def test_rounds_move_the_model_and_are_on_record(tmp_path: Path) -> None:
    federation, journal = Federation(sites()), tmp_path / "journal.sqlite"
    federation.run(CohortController("uniform", num_rounds=4, journal=str(journal), policy={"size": 3, "wait_for": 5}))
    assert not federation.panics and len(federation.persistor.saved) == 4
    expected = np.zeros(3, np.float32)
    for chosen, saved in zip(cohorts(journal), federation.persistor.saved, strict=True):
        expected = np.mean([(expected + float(name.split("-")[1])) / 2 for name in chosen], axis=0)
        np.testing.assert_allclose(saved["w"], expected, rtol=1e-5)
    assert all(set(found.values()) == {Status.OK} for found in statuses(journal).values())
    record = read_journal(journal)
    assert record.metrics()[3] == {"train/accuracy": 0.5} and record.events("ended")[-1]["state"] == "finished"
    record.close()


def test_a_selector_gets_its_answers(tmp_path: Path) -> None:
    """Power of choice picks the two sites whose number is farthest from the model."""
    federation, journal = Federation(sites()), tmp_path / "journal.sqlite"
    federation.run(
        CohortController(
            "power-of-choice", {"d": 5}, num_rounds=3, journal=str(journal), policy={"size": 2, "wait_for": 5}
        )
    )
    models = [np.zeros(3), *(saved["w"] for saved in federation.persistor.saved)]
    for chosen, model in zip(cohorts(journal), models, strict=False):
        distance = {f"site-{k}": abs(k - model[0]) for k in range(1, 6)}
        assert {distance[name] for name in chosen} == set(sorted(distance.values())[-2:])


def test_a_site_reports_what_only_it_knows(tmp_path: Path) -> None:
    """A selector in one file, with signals of its own."""

    class Warm(Pull):
        def answers(self, fl_ctx: Any) -> Answers:
            number = self.number(fl_ctx)
            return Answers(
                reports={
                    "battery-used": lambda params, received: number,
                    own_signals.SENSORS: lambda params, received: [20.0, float(params["w"][0])],
                }
            )

    federation, journal = Federation({f"site-{k}": Warm() for k in range(1, 4)}), tmp_path / "journal.sqlite"
    selector = f"{own_signals.__file__}:Gentle"
    federation.run(CohortController(selector, num_rounds=1, journal=str(journal), policy={"wait_for": 3}))
    assert not federation.panics
    record = read_journal(journal)
    found = {record.table()[0].name(reply.client): reply.metrics for reply in record.replies(0)}
    record.close()
    assert {name: values["battery-used"] for name, values in found.items()} == {"site-1": 1, "site-2": 2, "site-3": 3}
    assert found["site-3"]["sensors"] == pytest.approx((20.0, 1.5))


def test_an_aggregator_of_the_job_is_used(tmp_path: Path) -> None:
    class Largest:
        """Takes the model of the largest first entry."""

        def reset_stats(self) -> None:
            self.models: list[Any] = []

        def accept_model(self, model: Any) -> None:
            self.models.append(model)

        def aggregate_model(self) -> Any:
            return max(self.models, key=lambda model: float(model.params["w"][0]))

    federation = Federation(sites(3), largest=Largest())
    federation.run(CohortController("uniform", num_rounds=1, aggregator_id="largest", policy={"wait_for": 3}))
    np.testing.assert_allclose(federation.persistor.saved[-1]["w"], 1.5)


@pytest.mark.clock
def test_a_deadline_closes_a_round_and_the_late_site_is_asked_last(tmp_path: Path) -> None:
    federation, journal = (
        Federation(sites(4, site_1=0.2, site_2=0.2, site_3=0.2, site_4=1.0)),
        tmp_path / "journal.sqlite",
    )
    federation.run(
        CohortController(
            "uniform", num_rounds=8, journal=str(journal), policy={"size": 4, "wait_for": 4, "deadline": 0.6}
        )
    )
    assert not federation.panics
    chosen = cohorts(journal)
    assert "site-4" in chosen[0] and "site-4" not in chosen[1]
    assert statuses(journal)[0]["site-4"] == Status.LATE


@pytest.mark.clock
def test_an_automatic_deadline_leaves_a_slow_site_behind(tmp_path: Path) -> None:
    federation, journal = (
        Federation(sites(4, site_1=0.2, site_2=0.2, site_3=0.2, site_4=8.0)),
        tmp_path / "journal.sqlite",
    )
    federation.run(
        CohortController(
            "uniform", num_rounds=5, journal=str(journal), policy={"size": 4, "wait_for": 4, "deadline": "auto"}
        )
    )
    assert not federation.panics and statuses(journal)[0]["site-4"] != Status.OK
    record = read_journal(journal)
    deadlines = [body["deadline"] for body in record.events("deadline")]
    record.close()
    assert deadlines[0] is None and all(deadline < 4 for deadline in deadlines[1:])


WEIGHING = """
import dataclasses
from fedcohort import Cohort
from fedcohort.selectors import All


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weighing(All):
    def select(self, state, slate, answer, rng):
        return Cohort(slate.candidates, weights=2.0 * slate.candidates + 1.0), state
"""


@pytest.mark.clock
@pytest.mark.parametrize("selector", ["all", "own.py:Weighing"])
@pytest.mark.parametrize("late", ["discard", "count"])
def test_a_late_model_is_an_update_of_the_next_round_if_it_is_to_count(
    late: Any, selector: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(WEIGHING)
    monkeypatch.chdir(tmp_path)
    federation, journal = Federation(sites(3, site_1=0.4, site_2=0.4, site_3=1.0)), tmp_path / "journal.sqlite"
    federation.run(
        CohortController(
            selector, num_rounds=2, journal=str(journal), policy={"wait_for": 3, "deadline": 0.8, "late": late}
        )
    )
    assert not federation.panics
    first, second = (saved["w"] for saved in federation.persistor.saved)
    one, two, three = (1.0, 1.0, 1.0) if selector == "all" else (1.0, 3.0, 5.0)
    np.testing.assert_allclose(first, (one * 0.5 + two * 1.0) / (one + two), rtol=1e-5)  # half-way from 0 to 1, to 2
    fresh = [(first + 1.0) / 2, (first + 2.0) / 2]
    stale = first + 1.5  # half-way from 0 to 3
    late_weight = three * 2**-0.5 if late == "count" else 0.0
    total = one * fresh[0] + two * fresh[1] + late_weight * stale
    np.testing.assert_allclose(second, total / (one + two + late_weight), rtol=1e-5)


def test_with_spares_the_first_models_are_enough(tmp_path: Path) -> None:
    federation, journal = Federation(sites(4, site_1=0.8)), tmp_path / "journal.sqlite"
    federation.run(
        CohortController("uniform", num_rounds=1, journal=str(journal), policy={"size": 3, "spares": 1, "wait_for": 4})
    )
    found = statuses(journal)[0]
    assert [name for name, status in found.items() if status == Status.OK] == ["site-2", "site-3", "site-4"]


def test_rules_decide_before_the_selector(tmp_path: Path) -> None:
    federation, journal = Federation(sites(6)), tmp_path / "journal.sqlite"
    rules = {"eligible": "even == True", "blocked": ["site-6"]}
    federation.run(
        CohortController("uniform", num_rounds=3, rules=rules, journal=str(journal), policy={"size": 2, "wait_for": 6})
    )
    assert {name for chosen in cohorts(journal) for name in chosen} == {"site-2", "site-4"}


def test_a_site_that_works_for_another_run_is_no_candidate(tmp_path: Path) -> None:
    federation, journal = Federation(sites()), tmp_path / "journal.sqlite"
    Leases(tmp_path / "leases.sqlite", "another run").take(["site-1", "site-2"])
    federation.run(
        CohortController(
            "uniform",
            num_rounds=3,
            journal=str(journal),
            leases=str(tmp_path / "leases.sqlite"),
            policy={"size": 3, "wait_for": 3},
        )
    )
    assert not federation.panics
    assert {name for chosen in cohorts(journal) for name in chosen} == {"site-3", "site-4", "site-5"}


def test_a_journal_is_continued(tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole.sqlite", tmp_path / "halves.sqlite"

    def play(journal: Path, rounds: int) -> Federation:
        federation = Federation(sites())
        federation.run(
            CohortController(
                "active-fl", num_rounds=rounds, journal=str(journal), seed=3, policy={"size": 2, "wait_for": 5}
            )
        )
        return federation

    long = play(whole, 6)
    play(halves, 2)
    short = play(halves, 6)
    assert cohorts(halves) == cohorts(whole)
    np.testing.assert_array_equal(short.persistor.saved[-1]["w"], long.persistor.saved[-1]["w"])
    assert len(short.persistor.saved) == 4


def test_an_operators_order_outlasts_a_restart(tmp_path: Path) -> None:
    journal = tmp_path / "journal.sqlite"

    def play(rounds: int) -> list[list[str]]:
        federation = Federation(sites())
        policy, rules = {"size": 2, "wait_for": 5}, {"blocked": ["site-5"]}
        federation.run(CohortController("uniform", journal=str(journal), num_rounds=rounds, policy=policy, rules=rules))
        assert not federation.panics
        return cohorts(journal)

    play(1)
    with Session.open(journal, rules=Rules(blocked=["site-1", "site-5"])) as session:
        assert session.rules == Rules(blocked=["site-1", "site-5"])
    assert all(not {"site-1", "site-5"} & set(chosen) for chosen in play(12)[1:])


def test_without_a_deadline_a_site_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    federation, journal = Federation(sites(4, site_2=20.0)), tmp_path / "journal.sqlite"

    def leave(site: str, task: str) -> None:
        if task == "train":
            federation.engine.hidden.add("site-2")

    federation.before_submission = leave
    federation.run(CohortController("uniform", num_rounds=3, journal=str(journal), policy={"wait_for": 3}))
    assert not federation.panics
    first, *rest = cohorts(journal)
    assert "site-2" in first and len(rest) == 2 and not any("site-2" in chosen for chosen in rest)
    assert statuses(journal)[0]["site-2"] == Status.FAILED


def test_a_site_that_joins_later_is_welcome(tmp_path: Path) -> None:
    federation, journal = Federation(sites(4)), tmp_path / "journal.sqlite"
    federation.engine.hidden = {"site-4"}
    federation.before_submission = lambda site, task: federation.engine.hidden.clear() if task == "train" else None
    federation.run(CohortController("uniform", num_rounds=4, journal=str(journal), policy={"wait_for": 3}))
    chosen = cohorts(journal)
    assert "site-4" not in chosen[0] and "site-4" in chosen[-1]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"selector": "nobody"}, "nobody"),
        ({"selector": "uniform", "policy": {"size": 0}}, "size"),
        ({"selector": "uniform", "filter": "fedca"}, "data at the server"),
        ({"selector": "uniform", "rules": {"eligible": "("}}, "never closed"),
    ],
)
def test_mistakes_are_found_where_the_job_is_written(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(FedcohortError, match=words):
        CohortController(**settings)


def test_a_run_ends_early_on_a_metric_and_stays_ended(tmp_path: Path) -> None:
    """Every site reports an accuracy of 0.5."""
    journal, rule = tmp_path / "journal.sqlite", {"metric": "train/accuracy", "models": 3}
    for rounds in (30, 40):
        federation = Federation(sites())
        federation.run(
            CohortController(
                num_rounds=rounds, journal=str(journal), policy={"size": 3, "wait_for": 5, "early_stop": rule}
            )
        )
        assert not federation.panics and len(cohorts(journal)) == 4
    with closing(read_journal(journal)) as record:
        assert "train/accuracy has not improved in 3 models" in record.events("ended")[-1]["reason"]
    with pytest.raises(FedcohortError, match="models"):
        CohortController(policy={"early_stop": {"metric": "train/accuracy", "models": 0}})
