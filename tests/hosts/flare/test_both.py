"""Flower and FLARE in one environment."""

from __future__ import annotations

import inspect
import subprocess
import sys
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


@pytest.mark.parametrize(
    ("program", "option"),
    [
        ("flower-superlink", "--serverappio-api-address"),
        ("flower-supernode", "--clientappio-api-address"),
        ("flower-supernode", "--grpc-adapter"),
    ],
)
def test_flares_own_runner_of_flower_apps_passes_options_that_flower_refuses(program: str, option: str) -> None:
    """The reason in docs/flare.md why there is no bridge. When this fails, try the bridge again."""
    pytest.importorskip("flwr")
    from nvflare.app_opt.flower import applet

    assert option in inspect.getsource(applet)
    value = [] if option == "--grpc-adapter" else ["127.0.0.1:9091"]
    code = (
        "import sys; from importlib.metadata import entry_points; "
        f"sys.argv = {[program, '--insecure', option, *value]}; "
        f"(found,) = entry_points(group='console_scripts', name='{program}'); found.load()()"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and option in done.stderr
