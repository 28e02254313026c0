"""Garbage in every public call: an error of the library's own, or a value that is fine; never a raw one."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from pathlib import Path

import numpy as np
import pytest

import fedcohort
import fedcohort.hosts.flower
import fedcohort.privacy
import fedcohort.selectors
from fedcohort import Cohort, LabelCounts, Losses, Selector, Session, Trial
from fedcohort.core.errors import InputError
from fedcohort.core.guard import guarded
from fedcohort.core.protocol import SELECTORS, RoundReport, RoundRequest
from fedcohort.selectors.numerics.class_balance import qcid

CASES = int(os.environ.get("FEDCOHORT_GARBAGE", "1500"))


def caller():
    """Import the module next to this one, whatever pytest imports modules by."""
    name = "fedcohort_garbage"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("garbage.py"))
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def test_no_garbage_brings_a_raw_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some of it can name a file
    garbage = caller()
    found = garbage.recipes()
    ends, raw = garbage.run(found, CASES, seed=16)
    assert not raw, f"{len(raw)} of {CASES}, for example\n" + "\n".join(raw[:20])
    assert ends["refused"] > CASES / 2  # else it is no garbage


def test_everything_exported_is_called():
    called = {recipe.name.split(".")[0].split(" ")[0] for recipe in caller().recipes()}
    registered = {cls.__name__ for cls in (SELECTORS.get(n) for n in SELECTORS)}
    reasons = {
        "compare": "see tests/test_api.py", "run": "the same", "extend": "the same", "load": "the same",
        "check_selector": "takes a selector", "flower": "a module",
        "Selector": "abstract", "LabelDecoder": "a protocol", "Signal": "an enumeration", "Status": "an enumeration",
        "Slate": "made by sessions, checks nothing", "Outcome": "made by sessions", "Incident": "made by failures",
        "per_client": "takes nothing", "register": "called as get",
        "EncryptedLabels": "needs a key", "LabelSeal": "needs a key", "KeyHolder": "needs a key",
        "ClientKey": "is a key",
        "KeyHolderServer": "listens", "PublicKey": "needs a key", "RemoteKeyHolder": "connects", "make_keys": "slow",
        "ServerValidation": "holds two things, checks nothing", "client_name": "is given a context by Flower",
    }  # fmt: skip
    for module in (fedcohort, fedcohort.selectors, fedcohort.privacy, fedcohort.hosts.flower):
        for name in module.__all__:
            item = getattr(module, name)
            if isinstance(item, type) and issubclass(item, BaseException):
                continue
            assert name in called or name in reasons or getattr(item, "__name__", "") in registered, name


@pytest.mark.parametrize("clients", [[0.5], [True], ["a"], [[0]], 3, np.array([1.0])])
def test_clients_are_whole_numbers(clients):
    for make in (Cohort, Losses, lambda c: Trial((c,))):
        with pytest.raises(InputError, match="list of whole numbers"):
            make(clients)


def test_an_empty_cohort_is_one():
    assert Cohort([]).size == 0 and Cohort([]).clients.dtype == np.int64


@pytest.mark.parametrize("large", [1e154, 1e300])
@pytest.mark.filterwarnings("error")
def test_class_balance_of_huge_counts_is_that_of_small_ones(large):
    counts = np.array([[8, 0, 1], [9, 0, 0], [0, 8, 8], [0, 9, 0], [5, 5, 5], [1, 2, 30]], float)
    power = 2.0 ** round(np.log2(large))
    for group in ([0, 2], [1, 3, 5], [0, 1, 2, 3, 4, 5]):
        assert qcid(LabelCounts(counts * power), group) == qcid(LabelCounts(counts), group)
    picked = []
    for scale in (2.0**300, power):  # beyond what chance leaves in a small sample
        session = Session(fedcohort.create("fedcbs"), fedcohort.ClientTable(labels=LabelCounts(counts * scale)), seed=4)
        picked.append([session.ask(RoundRequest(2)).names for _ in range(3)])
    assert picked[0] == picked[1]


def test_counts_whose_sum_is_no_number_are_refused():
    with pytest.raises(InputError, match="sums of label counts must be finite"):
        fedcohort.ClientTable(labels=LabelCounts([[1e308, 1e308], [1, 1]]))
    assert fedcohort.ClientTable(sizes=[1e308, 1e308]).weights.tolist() == [0.5, 0.5]


# -- the guard itself -----------------------------------------------------------------------------------------------


@guarded
def worked(values: list[int], power: float = 2.0, name: str | None = None) -> float:
    return sum(value**power for value in values)


def test_the_argument_that_does_not_fit_is_named():
    assert worked([1, 2]) == 5
    with pytest.raises(InputError, match=r"The 'values\[1\]' argument of worked must be int. Got 'a'\."):
        worked([1, "a"])
    with pytest.raises(InputError, match=r"The 'power' argument of worked must be float. Got None\."):
        worked([1], None)
    with pytest.raises(InputError, match=r"worked cannot use its arguments: OverflowError"):
        worked([10**300], 1e9)
    with pytest.raises(TypeError, match="unexpected keyword"):  # not called as it must be
        worked([1], wrong=3)
    assert str(inspect.signature(worked)).startswith("(values")


def test_an_error_of_a_selector_is_passed_on_as_it_is():
    class Broken(type(fedcohort.create("uniform"))):
        def select(self, state, slate, answer, rng):
            raise ZeroDivisionError("mine")

    session = Session(Broken(), fedcohort.ClientTable(n=3))
    with pytest.raises(ZeroDivisionError, match="mine"):
        session.ask(RoundRequest(1))
    with pytest.raises(InputError, match=r"The 'report.ticket' argument of Session.tell must be int. Got \[\]"):
        session.tell(RoundReport([], [0]))


def test_guards_are_where_people_call():
    for item in (Session.ask, Session.join, Session.__init__, Cohort.__init__, fedcohort.ClientTable.indices):
        assert hasattr(item, "__wrapped__")
    assert not hasattr(Selector.select, "__wrapped__")
