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
    assert theirs == ours, f"Strategy.start of {FLOWER} takes {theirs}, that of CohortStrategy {ours}"


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
