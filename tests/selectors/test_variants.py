"""Variants of the papers' selectors: what each changes, and journals from before the names were split continue."""

import pytest

from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import JournalError
from fedcohort.core.selector_spec import describe, rebuild_selector
from fedcohort.selectors.baselines.divfl import DivFL
from fedcohort.selectors.baselines.e3cs import E3CS
from fedcohort.selectors.ours.advantage import FlashAdvantage, NeuralBanditAdvantage, RestlessBanditAdvantage
from fedcohort.selectors.ours.fedacs_near import FedAcsNear
from fedcohort.selectors.ours.fedcbs_chance import FedCBSChance
from fedcohort.selectors.ours.hics_fl_auto import HicsFLAuto
from fedcohort.selectors.papers.flash import Flash
from fedcohort.session import Session

OLD_CONTEXTUAL = {
    "reward": "robust-advantage",
    "context": ["robust-loss", "validation-loss", "duration", "last-reward"],
    "pool": 0.8,
    "uniform_share": 0.1,
    "first_round": "all",
    "first_round_limit": 1000,
}
OLD_NEURAL = {"exploration": 0.1, "ridge": 1.0, "width": 16, "interval": 5, "steps": 50, "rate": 0.1, "memory": 256}
OLD = {
    "flash": (
        FlashAdvantage(),
        OLD_CONTEXTUAL | {"contexts": "last", "exploration": 0.1, "ridge": 1.0, "delta": 0.1, "patience": None},
    ),
    "neural-bandit": (NeuralBanditAdvantage(), OLD_CONTEXTUAL | OLD_NEURAL),
    "restless-bandit": (
        RestlessBanditAdvantage(),
        OLD_CONTEXTUAL | {"states": 2, "exploration": 3.0, "ridge": 1.0},
    ),
    "fedacs": (
        FedAcsNear(),
        {"pool_share": 0.4, "eta": 1.0, "duels": "near", "insight": "gradient", "mean": "clients"},
    ),
    "fedcbs": (FedCBSChance(), {"exploration": 10.0, "beta": 1.0, "floor": "chance", "swaps": 0}),
    "e3cs": (E3CS(), {"fairness": 0.5, "rate": 0.5, "until": None}),
    "hics-fl": (
        HicsFLAuto(preference=2.0),
        {
            "temperature": "auto",
            "entropy_weight": 10.0,
            "clusters": None,
            "preference": 2.0,
            "rounds": 200,
            "memory": 1000,
        },
    ),
    "divfl": (DivFL(), {"sample": None, "memory": 1000}),
}
"""By name: what version 0.2 wrote into a journal, and the selector that continues it."""


@pytest.mark.parametrize("name", OLD)
def test_a_journal_of_version_0_2_continues_with_its_rule(name):
    variant, params = OLD[name]
    spec = {"name": name, "class": "fedcohort.selectors:Old", "reference": None, "params": params}
    assert rebuild_selector(spec, None, None) == variant
    assert rebuild_selector(spec, variant, None) == variant


def test_a_journal_of_the_papers_form_does_not_continue_with_the_variant(tmp_path):
    spec = describe(Flash(exploration=0.5))
    assert rebuild_selector(spec, None, None) == Flash(exploration=0.5)
    with pytest.raises(JournalError, match=r"'flash'.*cannot be continued with 'flash-advantage'"):
        rebuild_selector(spec, FlashAdvantage(), None)
    with Session(FlashAdvantage(pool=0.5), ClientTable(n=5), journal=tmp_path / "a.sqlite") as session:
        assert session.round == 0
    with Session.open(tmp_path / "a.sqlite") as session:
        assert session.selector == FlashAdvantage(pool=0.5)


@pytest.mark.parametrize("params", [{"average": "size-mean"}, {"by": "size", "speed": 3.0}])
def test_a_journal_with_removed_parameters_is_refused_by_name(params):
    spec = {"name": "clustered", "class": "fedcohort.selectors:Old", "reference": None, "params": params}
    with pytest.raises(JournalError, match=r"had the parameter (average='size-mean'|speed=3\.0)"):
        rebuild_selector(spec, None, None)
