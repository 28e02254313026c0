"""Another selector by an operator's order, after a trial, while a job runs on FLARE and after it was restarted."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from fedcohort.hosts import orders
from fedcohort.hosts.flare import CohortController
from fedcohort.hosts.orders import Order
from fedcohort.journal import read_journal

from .federation import Federation, cohorts
from .test_rounds import sites


def test_a_trial_ends_with_the_new_selector_and_a_restart_keeps_it(tmp_path: Path) -> None:
    journal = tmp_path / "journal.sqlite"

    def run(rounds: int, before: object = None) -> None:
        federation = Federation(sites())
        if before is not None:
            federation.before_submission = before  # type: ignore[assignment]  # a test's own function
        federation.run(
            CohortController(
                "size-weighted", num_rounds=rounds, journal=str(journal), policy={"size": 2, "wait_for": 5}
            )
        )
        assert not federation.panics

    given: list[str] = []

    def order(site: str, task: str) -> None:
        if task == "train" and not given and len(cohorts(journal)) == 3:
            given.append(site)
            orders.give(journal, Order(selector="active-fl", trial=3))

    run(5, order)
    assert given
    with closing(read_journal(journal)) as record:
        assert list(record.meta()["shadows"]) == ["active-fl on trial"] and not record.events("selector")
    run(9)
    with closing(read_journal(journal)) as record:
        (change,) = record.events("selector")
        assert (change["round"], change["to"]["name"]) == (6, "active-fl") and not record.meta()["shadows"]
        # The sites reported what the shadow reads, so it was blind only before it had learned anything.
        seen = {row.round: record.scores(row.ticket).get("active-fl on trial") for row in record.cohorts()}
        assert [number for number, pick in seen.items() if pick] == [3, 4, 5] and seen[5][2] is None
        assert len(record.cohorts()) == 9
