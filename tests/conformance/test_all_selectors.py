"""Every registered selector passes every conformance check, with each of its checked parameter sets."""

from dataclasses import dataclass, fields
from typing import ClassVar

import pytest

from fedcohort import create
from fedcohort.core.errors import InputError
from fedcohort.core.params import Interval, param
from fedcohort.core.protocol import SELECTORS
from fedcohort.selectors import Uniform
from fedcohort.testing import CHECKS, ConformanceError, ScriptedHost, check_selector, checked_forms, run_check
from fedcohort.testing.conformance import ABOUT_THE_CLASS, check_resume, check_same_seed, play_elsewhere

# name -> {check: written reason}
EXCEPTIONS: dict[str, dict[str, str]] = {}
# With other parameters than the defaults, these run in full only with `-m slow`. Two of them otherwise run with fewer
# rounds, and what "cohort" is about, the session checks in every round of the others too.
LONG = {"cohort", "relabelling", "resume", "same-seed", "bounded-state"}
ONE_AT_A_TIME = [check for check in CHECKS if check != "other-process"]  # one process for all selectors below

DEFAULTS = [(name, check) for name in SELECTORS.names() for check in ONE_AT_A_TIME]
FORMS = [
    pytest.param(name, form, check, marks=[pytest.mark.slow] if check in LONG else [])
    for name in SELECTORS.names()
    for form in checked_forms(create(name))
    for check in ONE_AT_A_TIME
    if form != "as given" and check not in ABOUT_THE_CLASS
]


@pytest.mark.parametrize(("name", "check"), DEFAULTS)
def test_conformance(name, check):
    if check in EXCEPTIONS.get(name, {}):
        pytest.skip(EXCEPTIONS[name][check])
    run_check(check, create(name))


@pytest.mark.parametrize(("name", "form", "check"), FORMS)
def test_conformance_of_other_parameters(name, form, check):
    run_check(check, checked_forms(create(name))[form])


@pytest.mark.parametrize(("name", "form"), dict.fromkeys(param.values[:2] for param in FORMS))
def test_other_parameters_repeat_and_resume_for_a_few_rounds(name, form):
    selector = checked_forms(create(name))[form]
    check_same_seed(selector, rounds=12)
    check_resume(selector, rounds=6)


def test_another_process_picks_the_same_cohorts():
    ours = sorted(
        {name for name, _ in DEFAULTS}
    )  # another test may have registered a selector that no other process knows
    forms = [(name, form, selector) for name in ours for form, selector in checked_forms(create(name)).items()]
    there = play_elsewhere([selector for _, _, selector in forms])
    host = ScriptedHost()
    for (name, form, selector), trace in zip(forms, there, strict=True):
        assert host.play(host.session(selector, seed=5), len(trace)) == trace, (name, form)


def test_selectors_with_parameters_have_checked_params():
    ours = [cls for cls in map(SELECTORS.get, SELECTORS.names()) if cls.__module__.startswith("fedcohort.")]
    assert [cls for cls in ours if fields(cls) and not cls.checked_params] == []


@dataclass(frozen=True, kw_only=True)
class FailsWhenStrict(Uniform):
    """Correct by default, and broken with its checked parameters."""

    checked_params: ClassVar = {"strict": {"strictness": 1}}

    strictness: int = param(0, Interval(int, 0, 1), "what it must not be")

    def select(self, state, slate, answer, rng):
        cohort, state = super().select(state, slate, answer, rng)
        assert self.strictness == 0
        return cohort, state


def test_check_selector_runs_the_checked_params_of_a_custom_class():
    skip = {check: "is not what this is about" for check in CHECKS if check != "nobody-available"}
    check_selector(Uniform(), skip=skip)
    with pytest.raises(ConformanceError, match=r"'strictness': 1.*'nobody-available'"):
        check_selector(FailsWhenStrict(), skip=skip)


def test_check_selector_takes_a_selector_its_class_or_a_name():
    skip = {check: "not the subject here" for check in CHECKS if check != "cohort"}
    for form in (Uniform(), Uniform, "uniform"):
        check_selector(form, skip=skip)
    with pytest.raises(ConformanceError):
        check_selector(FailsWhenStrict, skip=skip)
    for wrong in (int, 3, None):
        with pytest.raises(InputError, match="'selector'"):
            check_selector(wrong, skip=skip)


def test_check_selector_runs_all_but_the_skipped():
    with pytest.raises(InputError, match="'nonsense'"):
        check_selector(create("uniform"), skip={"nonsense": "because"})


def test_the_registry_is_not_empty():
    assert {"uniform", "size-weighted", "all", "power-of-choice", "active-fl"} <= set(SELECTORS.names())
