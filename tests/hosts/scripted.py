"""A host whose clients do what a script says, on a clock that moves only while it waits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from fedcohort.core.protocol import Cohort, RoundReport, Status
from fedcohort.hosts.live import Aggregation, Host, Online
from fedcohort.hosts.round import Reply, Round, Shortage
from fedcohort.session import Session

Script = Callable[[Cohort, str], tuple[float, Status] | None]


class TimedHost(Host):
    """Each client of a cohort replies after some seconds with a status, or never.

    Parameters
    ----------
    clients : names of those who are online, or a function of the time that returns them
    script : for a cohort and a client, when and what it replies; None for never
    """

    def __init__(self, clients: Sequence[str] | Callable[[float], Sequence[str]], script: Script | None = None) -> None:
        self.clients = clients if callable(clients) else lambda _: clients
        self.script = script or (lambda cohort, name: (1.0, Status.OK))
        self.time = 0.0
        self.on_the_way: list[tuple[float, Reply]] = []
        self.unreachable: Mapping[str, str] = {}
        self.busy: Sequence[str] = ()
        self.events: list[tuple[Any, ...]] = []
        self.rounds: list[Round] = []

    def now(self) -> float:
        return self.time

    def online(self) -> Online:
        return Online(list(self.clients(self.time)), list(self.busy))

    def send(self, cohort: Cohort) -> Mapping[str, str]:
        self.events.append(("send", cohort.round, cohort.names))
        missed = {name: why for name, why in self.unreachable.items() if name in cohort.names}
        for name in cohort.names:
            found = None if name in missed else self.script(cohort, name)
            if found is not None:
                seconds, status = found
                reason = "" if status is Status.OK else f"{name} is {status.name}"
                self.on_the_way.append(
                    (self.time + seconds, Reply(cohort.ticket, name, status, reason, seconds, len(name)))
                )
        return missed

    def receive(self, until: float) -> list[Reply]:
        following = min((at for at, _ in self.on_the_way), default=math.inf)
        assert math.isfinite(min(following, until)), "the host would wait for ever"
        self.time = max(self.time, min(following, until))
        arrived = [reply for at, reply in self.on_the_way if at <= self.time]
        self.on_the_way = [(at, reply) for at, reply in self.on_the_way if at > self.time]
        return arrived

    def combine(self, round_: Round) -> Aggregation:
        self.rounds.append(round_)
        kept = np.array([reply.status is Status.OK for reply in round_.in_order()], np.bool_)
        return Aggregation(kept, error=round_.shortfall(int(kept.sum())))

    def on_waiting(self, shortage: Shortage, seconds: float) -> None:
        self.events.append(("waiting", shortage.describe()))

    def on_abandoned(self, round_: Round, aggregation: Aggregation) -> None:
        self.events.append(("abandoned", round_.cohort.round, aggregation.error))

    def on_late(self, reply: Reply, round_: int) -> None:
        self.events.append(("late", reply.client, round_))

    def cohorts(self) -> list[tuple[str, ...]]:
        """The cohorts that were sent, in order."""
        return [event[2] for event in self.events if event[0] == "send"]


def in_time(report: Any) -> Any:
    """Return a report without late replies, which a host that waits does not know yet."""
    ticket, clients, status, kept, complete = report
    there = [s != Status.LATE for s in status]
    return (
        ticket,
        *([x for x, keep in zip(part, there, strict=True) if keep] for part in (clients, status, kept)),
        complete,
    )


def reports_of(work: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return every report that sessions get during ``work``: ticket, clients, statuses, kept, complete."""
    told: list[Any] = []
    tell = Session.tell

    def listen(self: Session, report: RoundReport, **rest: Any) -> None:
        told.append(
            (
                report.ticket,
                self.table.indices(report.clients).tolist(),
                [Status.OK] * len(report.clients) if report.status is None else [int(s) for s in report.status],
                None if report.kept is None else [bool(k) for k in report.kept],
                report.complete,
            )
        )
        tell(self, report, **rest)

    with monkeypatch.context() as patched:
        patched.setattr(Session, "tell", listen)
        work()
    return told
