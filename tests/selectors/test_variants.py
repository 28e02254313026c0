"""A journal of a paper's selector, of its variant, and of another version of either."""

import pytest

from fedcohort import create
from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import JournalError
from fedcohort.core.selector_spec import describe, rebuild_selector
from fedcohort.selectors.ours.flash_advantage import FlashAdvantage
from fedcohort.selectors.papers.flash import Flash
from fedcohort.session import Session


def test_a_journal_of_the_papers_form_does_not_continue_with_the_variant(tmp_path):
    spec = describe(Flash(exploration=0.5))
    assert rebuild_selector(spec, None, None) == Flash(exploration=0.5)
    with pytest.raises(JournalError, match=r"'flash'.*'flash-advantage'"):
        rebuild_selector(spec, FlashAdvantage(), None)
    with Session(FlashAdvantage(pool=0.5), ClientTable(n=5), journal=tmp_path / "a.sqlite") as session:
        assert session.round == 0
    with Session.open(tmp_path / "a.sqlite") as session:
        assert session.selector == FlashAdvantage(pool=0.5)


@pytest.mark.parametrize(
    ("name", "changed", "removed", "found"),
    [
        ("clustered", {"average": "size-mean"}, [], r"average='size-mean'"),
        ("clustered", {"speed": 3.0}, [], r"speed=3\.0"),
        ("bounded", {}, ["share"], r"no parameter share"),
        ("flash", {"pool": 0.8, "reward": "robust-advantage"}, [], r"pool=0\.8"),
    ],
)
@pytest.mark.parametrize("given", [True, False])
def test_a_journal_of_another_version_is_refused_with_the_parameter(name, changed, removed, found, given):
    spec = describe(create(name))
    params = {key: value for key, value in spec["params"].items() if key not in removed} | changed
    with pytest.raises(JournalError, match=rf"{name}.*another version.*{found}"):
        rebuild_selector(spec | {"params": params}, create(name) if given else None, None)
