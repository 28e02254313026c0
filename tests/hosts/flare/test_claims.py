"""What a site says about its data binds that site only: a bad claim is named, and the job goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedcohort.hosts.flare import Answers, CohortController, CohortExecutor, Facts
from fedcohort.hosts.flare.wire import DESCRIBE
from fedcohort.hosts.flower import corrections
from fedcohort.hosts.wire import RECORD
from fedcohort.journal import read_journal

from .federation import Federation, Pull

Change = Callable[[dict[str, Any]], Any]


class Counting(Pull):
    """A site that tells its labels."""

    def answers(self, fl_ctx: FLContext) -> Answers:
        return Answers(lambda: Facts(10, label_counts=[4, 6]))


class Claiming(CohortExecutor):
    """A site that changes what it says about itself before it leaves."""

    def __init__(self, executor: Pull, change: Change) -> None:
        super().__init__(executor)
        self.change = change

    def execute(self, task_name: str, shareable: Any, fl_ctx: FLContext, abort_signal: Any) -> Any:
        result = super().execute(task_name, shareable, fl_ctx, abort_signal)
        if task_name != DESCRIBE:
            return result
        model = FLModelUtils.from_shareable(result)
        found = self.change(model.meta[RECORD])
        model.meta[RECORD] = model.meta[RECORD] if found is None else found
        return FLModelUtils.to_shareable(model)


def put(**values: Any) -> Change:
    return lambda record: record.update({key.replace("_", "-"): value for key, value in values.items()})


CLAIMS: dict[str, Change] = {
    "a key that is no text": lambda record: record.update({7: 1, (1, 2): 3}),
    "signals that are no texts": lambda record: record.update(signals=[*record["signals"], ["loss"], {"a": 1}, 3]),
    "10,000 classes": put(label_counts=[1] * 10_000, size=10_000),
    "a class more": put(label_counts=[3, 3, 4]),
    "more samples in classes than in all": put(label_counts=[500, 6]),
    "a negative count": put(label_counts=[14, -4]),
    "a version of a million characters": put(version="9" * 1_000_000),
    "an attribute that is a table": lambda record: record.update({"attribute:a": {"b": 1}}),
    "a list": lambda record: [1, 2, 3],
}
FIT = {"a key that is no text", "signals that are no texts"}  # what is odd about these says nothing about data


def run(change: Change, journal: Path, **settings: Any) -> Federation:
    names = [f"site-{k}" for k in range(1, 6)]
    federation = Federation({name: Counting() for name in names})
    federation.sites["site-3"] = Claiming(Counting(), change)
    policy = {"wait_for": 4, "size": 2, "patience": 30.0}
    federation.run(CohortController("fedcbs", journal=str(journal), **{"num_rounds": 2, "policy": policy, **settings}))
    return federation


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claim_binds_its_maker_only(claim: str, tmp_path: Path) -> None:
    federation = run(CLAIMS[claim], tmp_path / "j")
    assert not federation.panics and len(federation.persistor.saved) == 2
    with closing(read_journal(tmp_path / "j")) as record:
        table, _ = record.table()
    assert ("site-3" in table.names) == (claim in FIT)
    assert table.label_counts.tolist() == [[4, 6]] * table.n


def test_one_of_two_sites_does_not_say_how_many_classes_there_are(tmp_path: Path) -> None:
    federation = Federation({f"site-{k}": Counting() for k in (1, 2)})
    federation.sites["site-2"] = Claiming(Counting(), put(label_counts=[1] * 9_000, size=9_000))
    controller = CohortController(
        "fedcbs", journal=str(tmp_path / "j"), num_rounds=1, policy={"size": 1, "wait_for": 1}
    )
    federation.run(controller)
    with closing(read_journal(tmp_path / "j")) as record:
        assert record.table()[0].label_counts.shape == (1, 2)


@pytest.mark.clock
def test_a_silent_site_does_not_end_a_run_whose_patience_is_short(tmp_path: Path) -> None:
    federation = Federation({f"site-{k}": Counting() for k in range(1, 6)})
    federation.alive["site-5"] = False
    begun = time.monotonic()
    federation.run(
        CohortController(
            "uniform", journal=str(tmp_path / "j"), num_rounds=1, policy={"size": 2, "wait_for": 3, "patience": 2.0}
        )
    )
    assert not federation.panics and len(federation.persistor.saved) == 1
    assert time.monotonic() - begun < 12


@pytest.mark.parametrize("sent", [None, {"accuracy": float("nan")}, {"accuracy": 1e300}, {"accuracy": "high"}])
def test_one_sites_metrics_do_not_take_away_those_of_the_others(sent: Any, tmp_path: Path) -> None:
    class Odd(Pull):
        def trained(self, model: FLModel, fl_ctx: FLContext) -> FLModel:
            found = super().trained(model, fl_ctx)
            found.metrics = sent
            return found

    federation = Federation({"site-1": Pull(), "site-2": Pull(), "site-3": Odd()})
    federation.run(
        CohortController("uniform", journal=str(tmp_path / "j"), num_rounds=1, policy={"size": 3, "wait_for": 3})
    )
    assert not federation.panics and len(federation.persistor.saved) == 1
    with closing(read_journal(tmp_path / "j")) as record:
        assert record.metrics()[0] == {"train/accuracy": 0.5}
    named = [found.client for found in corrections(tmp_path / "j")]
    assert named == ([] if sent is None else ["site-3"])
