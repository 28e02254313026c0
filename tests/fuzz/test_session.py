"""Sessions under any sequence of events."""

from random import Random

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from .budget import EVENTS, tries
from .sessions import EVENTS as WHAT
from .sessions import Life

LOT = st.integers(0, 2**31 - 1)


class Machine(RuleBasedStateMachine):
    life: Life | None = None

    @initialize(lot=LOT)
    def begin(self, lot):
        self.life = Life(Random(lot))

    def teardown(self):
        if self.life is not None:
            self.life.end()


def _event(name):
    def happen(self, lot):
        WHAT[name](self.life, Random(lot))

    return rule(lot=LOT)(happen)


for _name in WHAT:
    times = {"ask": 4, "tell": 4}.get(_name, 1)
    for _i in range(times):
        setattr(Machine, f"{_name}_{_i}" if _i else _name, _event(_name))
Machine.TestCase.settings = tries("session", each=EVENTS)
TestSessions = Machine.TestCase
