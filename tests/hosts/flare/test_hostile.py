"""Hostile, broken and dead sites: none of them ends a run or reaches the model, and each is named in the record."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_common.abstract.fl_model import FLModel

from fedcohort.core.protocol import Status
from fedcohort.hosts import ask_again
from fedcohort.hosts.flare import Answers, CohortController, failures
from fedcohort.hosts.flare import run as flare_run
from fedcohort.hosts.wire import RECORD

from .federation import Federation, Pull
from .test_rounds import statuses

pytestmark = pytest.mark.clock  # honest sites have a second to answer
OVER = threading.Event()


class Hostile(Pull):
    """A site that answers honestly about itself and then sends something else than a model."""

    def __init__(self, send: Callable[[FLModel], Any]) -> None:
        super().__init__()
        self.send = send

    def trained(self, model: FLModel, fl_ctx: FLContext) -> FLModel:
        honest = super().trained(model, fl_ctx)
        found = self.send(honest)
        return honest if found is None else found


class Replying(Pull):
    """A site whose whole result is something else."""

    def __init__(self, result: Callable[[], Any]) -> None:
        super().__init__()
        self.result = result

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Any) -> Shareable:
        return self.result()


class Liar(Pull):
    """A site that cannot say who it is."""

    def answers(self, fl_ctx: FLContext) -> Answers:
        raise RuntimeError("no answers here")


def change(**parts: Any) -> Callable[[FLModel], None]:
    def apply(model: FLModel) -> None:
        for name, value in parts.items():
            setattr(model, name, value)

    return apply


def crash() -> Any:
    raise RuntimeError("out of memory")


KINDS: dict[str, Pull] = {
    "raises": Replying(crash),
    "fatal-code": Replying(lambda: make_reply(ReturnCode.TASK_UNKNOWN)),
    "any-code": Replying(lambda: make_reply("NONSENSE\n" * 50)),
    "no-model": Replying(lambda: Shareable({"x": 1})),
    "nan": Hostile(change(params={"w": np.full(3, np.nan, np.float32)})),
    "huge": Hostile(change(params={"w": np.full(3, 1e300)})),
    "other-shape": Hostile(change(params={"w": np.zeros((3, 3), np.float32)})),
    "other-names": Hostile(change(params={"v": np.zeros(3, np.float32)})),
    "text": Hostile(change(params={"w": np.array(["a", "b", "c"])})),
    "nothing": Hostile(change(params={})),
    "weight-nan": Hostile(change(meta={"NUM_STEPS_CURRENT_ROUND": float("nan")})),
    "weight-text": Hostile(change(meta={"NUM_STEPS_CURRENT_ROUND": "all"})),
    "dead": Replying(lambda: OVER.wait(30) and None),
}


def run(kinds: dict[str, Pull], journal: Path, rounds: int = 3, deadline: float = 1.0) -> Federation:
    OVER.clear()
    honest = {f"site-{k}": Pull() for k in (1, 2, 3)}
    named = {f"site-{k}": site for k, site in enumerate(kinds.values(), 11)}
    federation = Federation({**honest, **named})
    try:
        federation.run(
            CohortController(
                "uniform",
                num_rounds=rounds,
                journal=str(journal),
                policy={"wait_for": 3, "deadline": deadline, "tries": 2, "max_share": 0.5},
            )
        )
    finally:
        OVER.set()
    return federation


@pytest.mark.parametrize("kind", KINDS)
def test_one_of_each_kind(kind: str, tmp_path: Path) -> None:
    journal = tmp_path / "journal.sqlite"
    federation = run({kind: KINDS[kind]}, journal)
    assert not federation.panics and len(federation.persistor.saved) == 3
    expected = np.zeros(3)
    for saved in federation.persistor.saved:
        expected = np.mean([(expected + k) / 2 for k in (1, 2, 3)], axis=0)
        np.testing.assert_allclose(saved["w"], expected, rtol=1e-5)
    first = statuses(journal)[0]
    assert {first[f"site-{k}"] for k in (1, 2, 3)} == {Status.OK} and first["site-11"] != Status.OK
    (why,) = {found.reason for found in failures(journal) if found.round == 0}
    assert why and len(why) < 400 and why.isprintable()


def test_all_of_them_at_once(tmp_path: Path) -> None:
    federation = run(KINDS, tmp_path / "journal.sqlite", rounds=2)
    assert not federation.panics and len(federation.persistor.saved) == 2
    np.testing.assert_allclose(federation.persistor.saved[0]["w"], 1.0, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_twenty_six_hostile_sites(seed: int, tmp_path: Path) -> None:
    """Two of each kind, each with something else beside its model and in its own time, against three honest ones."""
    draw = np.random.default_rng(seed)
    records: list[Any] = [None, [1, 2], "text", {"version": 99}, {"loss": "low"}, {"version": 1, "signals": {}}, 2**60]

    class Odd(Pull):
        def __init__(self, site: Pull) -> None:
            super().__init__()
            self.site, self.wait = site, float(draw.choice([0.0, 0.0, 0.3]))
            self.record = records[int(draw.integers(len(records)))]

        def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Any) -> Shareable:
            OVER.wait(self.wait)
            result = self.site.execute(task_name, shareable, fl_ctx, abort_signal)
            if isinstance(result, Shareable) and self.record is not None:
                result.setdefault("meta_props", {})[RECORD] = self.record
            return result

    kinds = list(KINDS.items())
    sites = {f"{kind}-{i}": Odd(site) for i in range(2) for kind, site in kinds}
    order = draw.permutation(list(sites)).tolist()
    journal = tmp_path / "journal.sqlite"
    federation = run({name: sites[name] for name in order}, journal, rounds=2, deadline=4.0)
    assert not federation.panics and len(federation.persistor.saved) == 2
    found = statuses(journal)
    for round_, saved in enumerate(federation.persistor.saved):
        assert {found[round_].get(f"site-{k}") for k in (1, 2, 3)} == {Status.OK}
        assert all(status != Status.OK for name, status in found[round_].items() if int(name.split("-")[1]) > 10)
        np.testing.assert_allclose(saved["w"], 2 - 2 * 0.5 ** (round_ + 1), rtol=1e-5)


def test_a_weight_is_bounded_by_what_a_site_declared(tmp_path: Path) -> None:
    journal = tmp_path / "journal.sqlite"
    federation = run({"greedy": Hostile(change(meta={"NUM_STEPS_CURRENT_ROUND": 2**52}))}, journal, rounds=1)
    (model,) = federation.persistor.saved
    assert not federation.panics
    # Three honest sites weigh 3 each, and at most half of the weight is the fourth's, which pulls to 11 / 2.
    assert model["w"][0] <= 0.5 * 1.0 + 0.5 * 5.5 + 1e-4


@pytest.mark.parametrize(
    "record", [[1, 2], "text", {"version": 99}, {"version": 1, "name": 3, "signals": "all"}, {"loss": "low"}]
)
def test_what_a_site_says_beside_its_model_may_be_anything(record: Any, tmp_path: Path) -> None:
    class Odd(Pull):
        def trained(self, model: FLModel, fl_ctx: FLContext) -> FLModel:
            found = super().trained(model, fl_ctx)
            found.meta[RECORD] = record
            return found

    federation = run({"odd": Odd()}, tmp_path / "journal.sqlite", rounds=2)
    assert not federation.panics and len(federation.persistor.saved) == 2


def test_a_site_that_cannot_describe_itself_takes_no_part(tmp_path: Path) -> None:
    journal = tmp_path / "journal.sqlite"
    federation = run({"liar": Liar()}, journal, rounds=2)
    assert not federation.panics
    assert all("site-11" not in found for found in statuses(journal).values())


@pytest.mark.parametrize("how", ["fails", "silent"])
def test_a_site_that_could_not_describe_itself_is_asked_again(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Starting(Pull):
        asked = 0

        def answers(self, fl_ctx: FLContext) -> Answers:
            self.asked += 1
            if self.asked == 1 and how == "silent":
                OVER.wait(1.0)
            if self.asked == 1:
                raise RuntimeError("still starting")
            return super().answers(fl_ctx)

    for module in (ask_again, flare_run):
        monkeypatch.setattr(module, "ASK_AGAIN_AFTER", 0.3)
    OVER.clear()
    journal = tmp_path / "journal.sqlite"
    late = Starting()
    federation = Federation({"site-1": Pull(0.2), "site-2": Pull(0.2), "site-11": late})
    federation.run(CohortController("uniform", num_rounds=15, journal=str(journal), policy={"wait_for": 2}))
    found = statuses(journal)
    assert not federation.panics and late.asked >= 2 and found[14]["site-11"] == Status.OK


def test_a_run_without_enough_sites_says_why(tmp_path: Path) -> None:
    federation = Federation({"site-1": Liar(), "site-2": Pull()})
    federation.run(CohortController("uniform", num_rounds=1, policy={"wait_for": 2, "patience": 0.5}))
    assert len(federation.panics) == 1 and "1 can take part" in federation.panics[0], federation.panics


def test_rounds_that_bring_no_model_end_the_run_with_the_reasons(tmp_path: Path) -> None:
    journal = tmp_path / "journal.sqlite"
    federation = Federation({f"site-{k}": Replying(crash) for k in (1, 2)})
    federation.run(
        CohortController(
            "uniform", num_rounds=2, journal=str(journal), policy={"wait_for": 2, "tries": 2, "deadline": 5.0}
        )
    )
    assert "no model in 2 tries" in federation.panics[0] and "EXECUTION_EXCEPTION" in federation.panics[0]
