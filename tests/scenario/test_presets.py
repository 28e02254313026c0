import doctest
from pathlib import Path

import pytest

from fedcohort.core.errors import UnknownNameError
from fedcohort.scenario import AVAILABILITIES, LATENCIES, PARTITIONS, PRESETS, preset

DOCS = Path(__file__).parents[2] / "docs" / "scenarios.md"


def test_the_papers_sizes():
    expected = {
        "fedcor-1spc": (100, 10),
        "fedcor-2spc": (100, 5),
        "fedcor-dir": (100, 5),
        "fedcbs-dir-0.1": (200, 10),
        "fedcbs-case1-3": (120, 10),
        "fedcbs-case2-5": (200, 10),
        "fedacs-low": (200, 10),
        "fedcm-client-0.1": (20, 8),
        "fedcm-class-5": (20, 8),
    }
    for name, (clients, cohort) in expected.items():
        assert (preset(name).partition.clients, PRESETS[name].cohort) == (clients, cohort)


def test_unknown_name():
    with pytest.raises(UnknownNameError, match="'flash-noise'"):
        preset("flash-nois")


@pytest.mark.skipif(not DOCS.is_file(), reason="the documentation is not beside the tests")
def test_the_documentation_is_complete_and_its_examples_run():
    text = DOCS.read_text(encoding="utf-8")
    for name in (*PARTITIONS.names(), *AVAILABILITIES.names()):
        assert f"| `{name}` |" in text, name
    assert "`fedcohort list presets`" in text
    assert all(f"`{name}`" in text for name in LATENCIES.names() if name != "none")
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    outcome = doctest.testfile(str(DOCS), module_relative=False, optionflags=flags, encoding="utf-8")
    assert outcome.failed == 0 and outcome.attempted > 20
