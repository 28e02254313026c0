"""Flower and FLARE in one environment."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires, version

import pytest
from packaging.requirements import Requirement


def test_what_each_asks_for_is_there_beside_the_other() -> None:
    pytest.importorskip("flwr")
    unmet = []
    for package in ("flwr", "nvflare"):
        for requirement in map(Requirement, requires(package) or ()):
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            try:
                found = version(requirement.name)
            except PackageNotFoundError:
                found = ""
            if not found or not requirement.specifier.contains(found, prereleases=True):
                unmet.append(f"{package} asks for {requirement}, and there is {found or 'none'}")
    assert not unmet


def test_both_hosts_can_be_imported_by_one_process() -> None:
    pytest.importorskip("flwr")
    from fedcohort.hosts.flare import CohortController
    from fedcohort.hosts.flower import CohortStrategy

    assert CohortController("uniform").num_rounds == 5 and CohortStrategy("uniform").seed == 0
