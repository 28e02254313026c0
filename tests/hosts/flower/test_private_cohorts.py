"""Under Flower's differential privacy, a cohort has the size that the noise needs, or nothing is released."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from flwr.app import RecordDict
from flwr.clientapp.mod import adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    FedProx,
)
from flwr.supercore.privacy_accounting import NeighboringRelation, PrivacyConfig, SamplingMethod
from flwr.supercore.privacy_accounting.rdp_accountant import RdpAccountant

from fedcohort.audit.choices import audit_journal
from fedcohort.core.errors import ParameterError
from fedcohort.core.protocol import Status
from fedcohort.hosts.flower import FederationTimeoutError, RoundError, cohort_client
from fedcohort.hosts.flower.wrapped_strategy import InnerStrategyError
from fedcohort.journal import read_journal
from fedcohort.selectors import FedCor
from fedcohort.session.rules import Rules


def accountant(**kwargs: Any) -> RdpAccountant:
    return RdpAccountant(
        PrivacyConfig(
            target_delta=1e-5,
            population_size=6,
            sampling_method=SamplingMethod.NO_AMPLIFICATION,
            neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
            **kwargs,
        )
    )


def base() -> FedAvg:
    return FedAvg(fraction_evaluate=0.0)


class Around(FedAvg):
    """An app's strategy that wraps another in its own attribute."""

    def __init__(self, held: Any) -> None:
        super().__init__(fraction_evaluate=0.0)
        self.held = held

    def configure_train(self, *args: Any) -> Any:
        return self.held.configure_train(*args)

    def aggregate_train(self, *args: Any) -> Any:
        return self.held.aggregate_train(*args)


FIXED = DifferentialPrivacyServerSideFixedClipping
WRAPPERS = {
    "server, fixed": (lambda: FIXED(base(), 0.1, 5.0, 4), []),
    "server, fixed, accountant": (lambda: FIXED(base(), 0.1, 5.0, 4, accountant=accountant()), []),
    "server, adaptive": (lambda: DifferentialPrivacyServerSideAdaptiveClipping(base(), 0.1, 4), []),
    "client, fixed": (
        lambda: DifferentialPrivacyClientSideFixedClipping(base(), 0.1, 5.0, 4),
        [fixedclipping_mod],
    ),
    "client, fixed, accountant": (
        lambda: DifferentialPrivacyClientSideFixedClipping(base(), 0.1, 5.0, 4, accountant=accountant()),
        [fixedclipping_mod],
    ),
    "client, adaptive": (
        lambda: DifferentialPrivacyClientSideAdaptiveClipping(base(), 0.1, 4),
        [adaptiveclipping_mod],
    ),
    "nested": (lambda: Around(Around(FIXED(base(), 0.1, 5.0, 4))), []),
}
every_wrapper = pytest.mark.parametrize("wrapper", WRAPPERS)


def equal(kit: Any, fails: Any = lambda number: False) -> Any:
    """Trains like all others, with the same weight."""

    def train(message: Any, context: Any) -> RecordDict:
        if fails(int(context.node_config["partition-id"])):
            raise ValueError("out of memory")
        content = kit.step(message, context)
        content["metrics"]["num-examples"] = 1
        return content

    return train


def fill(fleet: Any, kit: Any, wrapper: str, count: int = 6, fails: Any = lambda number: False, **kwargs: Any) -> None:
    for number in range(count):
        app = kit.client_app(equal(kit, fails), mods=WRAPPERS[wrapper][1])
        fleet.grid.add(fleet.node(number, cohort_client(app, kit.ANSWERS), **kwargs))


def releases(journal: Path) -> list[list[Status]]:
    """The replies of every cohort whose model was released."""
    record = read_journal(journal)
    given_up = {body["ticket"] for body in record.events("abandoned")}
    return [
        [Status(reply.status) for reply in record.replies(row.ticket)]
        for row in record.cohorts()
        if row.ticket not in given_up
    ]


@every_wrapper
def test_rules_that_leave_too_few_end_the_run_and_nothing_is_released(
    empty_fleet: Any, kit: Any, wrapper: str, tmp_path: Path
) -> None:
    fill(empty_fleet, kit, wrapper)
    rules = Rules(blocked=tuple(f"client-{i}" for i in range(1, 6)))
    strategy = empty_fleet.strategy(
        "uniform", WRAPPERS[wrapper][0](), rules=rules, patience=20.0, journal=tmp_path / "j"
    )
    with pytest.raises(FederationTimeoutError, match=r"1 client.*\(it is blocked\), .*4"):
        strategy.start(empty_fleet.grid, kit.model(counter=False), num_rounds=2)
    assert not empty_fleet.trained() and empty_fleet.clock.now >= 20
    again = empty_fleet.strategy(
        "uniform", WRAPPERS[wrapper][0](), rules=Rules(blocked=("client-1",)), journal=tmp_path / "j"
    )
    again.start(empty_fleet.grid, kit.model(counter=False), num_rounds=2)
    assert releases(tmp_path / "j") == [[Status.OK] * 4] * 2


@every_wrapper
def test_a_client_that_never_answers_is_left_out_and_nothing_is_released_without_it(
    empty_fleet: Any, kit: Any, wrapper: str, tmp_path: Path
) -> None:
    """A wrapper does not see a missing reply; without an accountant, three models would pass for four."""
    fill(empty_fleet, kit, wrapper, count=5)
    silent = empty_fleet.grid.node_of("client-2")
    empty_fleet.grid.nodes[silent].latency = 1e9
    strategy = empty_fleet.strategy(
        "uniform", WRAPPERS[wrapper][0](), journal=tmp_path / "j", deadline=10.0, patience=30.0, seed=3
    )
    strategy.start(empty_fleet.grid, kit.model(counter=False), num_rounds=3)
    assert releases(tmp_path / "j") == [[Status.OK] * 4] * 3
    tried = Counter(row.round for row in read_journal(tmp_path / "j").cohorts())
    assert max(tried.values()) <= 2 < len(list(tried.elements())), "it fails a try once, and not the next one"


def test_silence_is_a_failure_that_cools_off(empty_fleet: Any, kit: Any, tmp_path: Path) -> None:
    """By the rules' count of cohorts, so that it costs one deadline and not one in every round; late is no error."""
    fill(empty_fleet, kit, "server, fixed", count=5)
    slow = empty_fleet.grid.node_of("client-2")
    empty_fleet.grid.nodes[slow].latency = lambda message: 12.0 if empty_fleet.clock.now < 9 else 1.0
    rules = Rules(failures=1, cool_off=4)
    strategy = empty_fleet.strategy(
        "uniform", FIXED(base(), 0.1, 5.0, 4), journal=tmp_path / "j", deadline=10.0, rules=rules, seed=3, audit=True
    )
    strategy.start(empty_fleet.grid, kit.model(counter=False), num_rounds=20)
    record = read_journal(tmp_path / "j")
    table, _ = record.table()
    took_part = [row.ticket for row in record.cohorts() if "client-2" in table.names_of(row.clients)]
    assert len(record.cohorts()) == 21 and took_part[1] > took_part[0] + 4
    assert any("answered after" in str(body["failures"].get("client-2")) for body in record.events("flower"))
    found = audit_journal(tmp_path / "j", seed=3)
    assert found.confirmed, found.problem


@every_wrapper
def test_a_client_that_fails_is_left_out_of_the_retry(empty_fleet: Any, kit: Any, wrapper: str, tmp_path: Path) -> None:
    fill(empty_fleet, kit, wrapper, fails=lambda number: number in (0, 5))
    strategy = empty_fleet.strategy("uniform", WRAPPERS[wrapper][0](), journal=tmp_path / "j", tries=1)
    strategy.start(empty_fleet.grid, kit.model(counter=False), num_rounds=4)
    assert releases(tmp_path / "j") == [[Status.OK] * 4] * 4
    record = read_journal(tmp_path / "j")
    table, _ = record.table()
    failed: dict[int, set[str]] = {}
    for row in record.cohorts():
        names = set(table.names_of(row.clients))
        assert len(names) == 4 and not names & failed.get(row.round, set())
        failed.setdefault(row.round, set()).update(names & {"client-0", "client-5"})
    assert any(failed.values())


def test_busy_clients_are_waited_for(empty_fleet: Any, kit: Any, tmp_path: Path) -> None:
    """Two of five are still at work on the round before; three are too few."""
    fill(empty_fleet, kit, "server, fixed", count=4)
    slow = empty_fleet.grid.node_of("client-1")
    empty_fleet.grid.nodes[slow].latency = lambda message: 25.0 if empty_fleet.clock.now < 5 else 1.0
    strategy = empty_fleet.strategy(
        "uniform", WRAPPERS["server, fixed"][0](), journal=tmp_path / "j", deadline=10.0, patience=60.0
    )
    strategy.start(empty_fleet.grid, kit.model(counter=False), num_rounds=2)
    assert releases(tmp_path / "j") == [[Status.OK] * 4] * 2
    assert empty_fleet.clock.now > 25


def test_a_restart_after_failures_leaves_the_same_clients_out(empty_fleet: Any, kit: Any, tmp_path: Path) -> None:
    """In this process with the same objects, too: Flower's wrapper remembers the round it was configured for."""
    broken = {0}
    fill(empty_fleet, kit, "server, fixed", count=5, fails=lambda number: number in broken)
    counted = accountant()
    inner = FIXED(base(), 0.1, 5.0, 4, accountant=counted)
    strategy = empty_fleet.strategy("uniform", inner, journal=tmp_path / "j", seed=1)

    class PowerCut(BaseException):
        pass

    def cut(message: Any) -> None:
        if message.metadata.message_type == "train":
            raise PowerCut

    empty_fleet.grid.hooks.append(cut)
    with pytest.raises(PowerCut):
        strategy.start(empty_fleet.grid, kit.model(counter=False), num_rounds=3)
    empty_fleet.grid.hooks.clear()
    strategy.start(empty_fleet.grid, kit.model(counter=False), num_rounds=3)
    assert releases(tmp_path / "j") == [[Status.OK] * 4] * 3
    assert counted.num_releases == 3


def test_too_many_failures_end_the_run_with_their_reasons_and_a_restart_goes_on(
    empty_fleet: Any, kit: Any, tmp_path: Path
) -> None:
    broken = {0, 1, 2}
    fill(empty_fleet, kit, "server, fixed", fails=lambda number: number in broken)
    counted = accountant()

    def start() -> None:
        inner = FIXED(base(), 0.1, 5.0, 4, accountant=counted)
        strategy = empty_fleet.strategy("uniform", inner, journal=tmp_path / "j", tries=2)
        strategy.start(empty_fleet.grid, kit.model(counter=False), num_rounds=3)

    with pytest.raises(RoundError, match=r"(?s)2 tries.*out of memory.* 4\b"):
        start()
    assert counted.num_releases == 0
    broken.clear()
    start()
    assert releases(tmp_path / "j") == [[Status.OK] * 4] * 3 and counted.num_releases == 3


def test_a_weight_unlike_the_others_is_its_own_clients_failure(empty_fleet: Any, kit: Any, tmp_path: Path) -> None:
    def heavy(message: Any, context: Any) -> RecordDict:
        content = equal(kit)(message, context)
        content["metrics"]["num-examples"] = 7
        return content

    fill(empty_fleet, kit, "server, fixed", count=5)
    empty_fleet.grid.nodes[empty_fleet.grid.node_of("client-3")].app = cohort_client(kit.client_app(heavy), kit.ANSWERS)
    inner = FIXED(base(), 0.1, 5.0, 4, accountant=accountant())
    strategy = empty_fleet.strategy("uniform", inner, journal=tmp_path / "j", tries=1)
    strategy.start(empty_fleet.grid, kit.model(counter=False), num_rounds=3)
    assert releases(tmp_path / "j") == [[Status.OK] * 4] * 3
    said = [body["failures"] for body in read_journal(tmp_path / "j").events("flower")]
    assert said and all(list(failures) == ["client-3"] for failures in said)
    assert "is 7, that of the others 1" in said[0]["client-3"]


def test_nobody_is_blamed_for_weights_that_all_differ(empty_fleet: Any, kit: Any) -> None:
    for number in range(4):
        empty_fleet.grid.add(empty_fleet.node(number))
    inner = FIXED(base(), 0.1, 5.0, 4, accountant=accountant())
    with pytest.raises(RoundError, match="equal"):
        empty_fleet.strategy("uniform", inner, tries=2).start(empty_fleet.grid, kit.model(counter=False), num_rounds=1)


def test_what_cannot_go_with_privacy_is_refused_at_once(empty_fleet: Any, kit: Any) -> None:
    for given, words in (
        ({"cohort_size": 3}, "must be 4: .* Got 3"),
        ({"spares": 1}, "spares"),
        ({"filter": "cmfl"}, "filter cannot be used"),
    ):
        with pytest.raises(ParameterError, match=words):
            empty_fleet.strategy("uniform", FIXED(base(), 1.0, 1.0, 4), **given)
    with pytest.raises(ParameterError, match="4 and 5"):
        empty_fleet.strategy("uniform", FIXED(FIXED(base(), 1.0, 1.0, 4), 1.0, 1.0, 5))
    assert empty_fleet.strategy("uniform", FIXED(FedProx(proximal_mu=0.1), 1.0, 1.0, 4)).policy.size == 4


def test_a_selector_that_takes_another_number_ends_the_run(empty_fleet: Any, kit: Any, tmp_path: Path) -> None:
    fill(empty_fleet, kit, "server, fixed")
    strategy = empty_fleet.strategy("all", FIXED(base(), 0.1, 5.0, 4), journal=tmp_path / "j")
    with pytest.raises(RoundError, match=r"6 clients.* 4\b"):
        strategy.start(empty_fleet.grid, kit.model(counter=False), num_rounds=1)
    assert not empty_fleet.trained()
    strategy = empty_fleet.strategy("uniform", FIXED(base(), 0.1, 5.0, 4), journal=tmp_path / "k")
    strategy.start(empty_fleet.grid, kit.model(counter=False), num_rounds=1)


def test_trials_would_release_models_without_noise(empty_fleet: Any, kit: Any) -> None:
    fill(empty_fleet, kit, "server, fixed, accountant")
    strategy = empty_fleet.strategy(FedCor(warmup=1, interval=1), WRAPPERS["server, fixed, accountant"][0]())
    with pytest.raises(InnerStrategyError, match="without the noise"):
        strategy.start(empty_fleet.grid, kit.model(counter=False), num_rounds=4)
    assert all(count == 4 for count in Counter(round_ for _, round_ in empty_fleet.trained()).values())
