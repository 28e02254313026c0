"""An operator's order for another selector reaches a host of one's own, in rounds and without."""

from contextlib import closing

import pytest

from fedcohort.core.clients import ClientTable
from fedcohort.core.signals import Signal
from fedcohort.hosts import orders
from fedcohort.hosts.live import play
from fedcohort.hosts.orders import Order
from fedcohort.hosts.round import Policy
from fedcohort.journal import read_journal
from fedcohort.session import Session

from .scripted import TimedHost

NAMES = ["anna", "ben", "cem", "dora", "emil"]


class Noting(TimedHost):
    """Notes who chooses."""

    def on_selector(self) -> None:
        self.events.append(("selector",))


@pytest.mark.parametrize("trial", [0, 3])
def test_an_own_host_takes_the_order(trial, tmp_path):
    path = tmp_path / "run.sqlite"
    host = Noting(NAMES)
    with Session(
        "uniform", ClientTable(names=NAMES), journal=path, signals=[Signal.DURATION], commit="manual"
    ) as session:
        play(host, session, Policy(size=2), 2)
        orders.give(path, Order(selector="refl", trial=trial))
        play(host, session, Policy(size=2), 8)
        assert session.selector.name == "refl" and host.events.count(("selector",)) == 1
    with closing(read_journal(path)) as record:
        assert [body["round"] for body in record.events("selector")] == [2 + trial]
