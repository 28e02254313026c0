"""Every registered selector passes every conformance check."""

import pytest

from fedcohort import create
from fedcohort.core.errors import InputError
from fedcohort.core.protocol import SELECTORS
from fedcohort.testing import CHECKS, check_selector, run_check

# name -> {check: written reason}
EXCEPTIONS: dict[str, dict[str, str]] = {}


@pytest.mark.parametrize("check", list(CHECKS))
@pytest.mark.parametrize("name", SELECTORS.names())
def test_conformance(name, check):
    if check in EXCEPTIONS.get(name, {}):
        pytest.skip(EXCEPTIONS[name][check])
    run_check(check, create(name))


def test_check_selector_runs_all_but_the_skipped():
    with pytest.raises(InputError, match="no check 'nonsense'"):
        check_selector(create("uniform"), skip={"nonsense": "because"})


def test_the_registry_is_not_empty():
    assert {"uniform", "size-weighted", "all", "power-of-choice", "active-fl"} <= set(SELECTORS.names())
