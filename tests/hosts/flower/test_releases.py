"""Undocumented parts of Flower that we use; these tests show if a new release breaks one."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp import strategy as strategies
from flwr.serverapp.strategy import FedAvg, Strategy

import fedcohort.hosts.flower
from fedcohort.hosts.flower.async_strategy import AsyncCohortStrategy
from fedcohort.hosts.flower.strategy import CohortStrategy
from fedcohort.hosts.flower.wrapped_strategy import SAMPLING, GridView

FLOWER = f"Flower {version('flwr')}"
PACKAGE = Path(fedcohort.hosts.flower.__file__).parent
PROJECT = Path(__file__).parents[3] / "pyproject.toml"


def imports() -> Iterator[Any]:
    for file in sorted(PACKAGE.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "flwr":
                for name in node.names:
                    yield pytest.param(node.module, name.name, id=f"{file.name}:{node.module}.{name.name}")


# Where a release may move things without saying so; flwr.common.constant is the one place of ErrorCode and SType.
PUBLIC = {"flwr.app", "flwr.clientapp", "flwr.clientapp.mod", "flwr.serverapp", "flwr.serverapp.strategy",
          "flwr.common.constant"}  # fmt: skip


def test_only_public_names_are_imported() -> None:
    assert {parameter.values[0] for parameter in imports()} <= PUBLIC


@pytest.mark.parametrize(("module", "name"), imports())
def test_a_name_we_import_is_there(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name), f"{FLOWER} has no {module}.{name}"


def test_the_view_on_some_nodes_is_a_whole_grid() -> None:
    missing = Grid.__abstractmethods__ - set(vars(GridView))
    assert not missing, f"{FLOWER} demands {', '.join(sorted(missing))} of a Grid, which GridView lacks"


def test_the_strategies_sample_by_the_fields_we_set() -> None:
    there = vars(FedAvg())
    missing = [name for name in (*SAMPLING, "weighted_by_key", "arrayrecord_key", "configrecord_key")
               if name not in there]  # fmt: skip
    assert not missing, f"FedAvg of {FLOWER} has no {', '.join(missing)}"


def test_every_privacy_wrapper_says_for_how_many_its_noise_is_made() -> None:
    wrappers = [kind for name, kind in vars(strategies).items() if name.startswith("DifferentialPrivacy")]
    assert wrappers, f"{FLOWER} has no strategies for differential privacy"
    for kind in wrappers:
        wanted = inspect.signature(kind).parameters
        assert "num_sampled_clients" in wanted, f"{kind.__name__} of {FLOWER} does not take num_sampled_clients"


def test_a_strategy_is_started_as_ours_is() -> None:
    theirs, ours = (list(inspect.signature(kind.start).parameters) for kind in (Strategy, CohortStrategy))
    assert theirs == ours[: len(theirs)], f"Strategy.start of {FLOWER} takes {theirs}, that of CohortStrategy {ours}"


def test_a_strategy_is_started_as_the_next_release_will_start_it() -> None:
    stub = ast.parse(Path(__file__).with_name("flower_1_43.pyi").read_text())
    starts = [node for node in ast.walk(stub) if isinstance(node, ast.FunctionDef) and node.name == "start"]
    ours = inspect.signature(CohortStrategy.start).parameters
    assert [argument.arg for argument in starts[0].args.args] == list(ours)
    assert ours["should_stop"].default is None


@pytest.mark.parametrize("kind", ["rounds", "flow"])
def test_a_run_ends_after_the_round_that_should_stop_names(kind: str, fleet: Any, kit: Any, tmp_path: Path) -> None:
    asked: list[tuple[int, int]] = []

    def should_stop(server_round: int, result: Any) -> bool:
        asked.append((server_round, max(result.train_metrics_clientapp)))
        return server_round >= 2

    def start(rounds: int, stop: Any) -> Any:
        settings = {"strategy": FedAvg(fraction_train=0.5), "journal": tmp_path / "j", "seed": 3}
        strategy: Any
        if kind == "rounds":
            strategy = fleet.strategy("uniform", **settings)
        else:
            strategy = AsyncCohortStrategy("uniform", busy=2, **settings)
            strategy.clock, strategy.sleep = fleet.clock, fleet.clock.sleep
        return strategy.start(fleet.grid, kit.model(), num_rounds=rounds, should_stop=stop)

    assert set(start(5, should_stop).train_metrics_clientapp) == {1, 2}
    assert asked == [(1, 1), (2, 2)]
    # The run is continued, and stops at once; without should_stop it goes on.
    assert set(start(5, should_stop).train_metrics_clientapp) == {1, 2} and asked[2:] == [(2, 2)]
    assert set(start(3, None).train_metrics_clientapp) == {1, 2, 3}


def test_the_mods_of_a_client_app_can_be_seen() -> None:
    missing = {"_mods", "_registered_funcs"} - set(vars(ClientApp(mods=[])))
    assert not missing, f"ClientApp of {FLOWER} has no {missing}: a LocalDpMod in it would not be noticed"


def test_the_release_is_one_we_claim() -> None:
    (asked,) = (
        extra
        for extra in tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]["flower"]
        if extra.startswith("flwr")
    )
    found = re.fullmatch(r"flwr>=(\d+)\.(\d+)", asked)
    assert found, f"the extra 'flower' must name an oldest release and no newest one. Got {asked!r}"
    release = tuple(map(int, version("flwr").split(".")[:2]))
    assert release >= tuple(map(int, found.groups())), f"{FLOWER} is older than {asked}"
