"""What each text of a journal holds, and where it may name a client. Forgetting a client depends on this.

A client chooses its own name, which may be a word that the journal uses: "ticket", "loss", the name of a selector.
Since each field declares what it holds, such a word is removed only where it names the client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from fedcohort.journal import events


class TextKind(Enum):
    """What a text, or each text of a list, holds."""

    OWN = auto()  # a word or number of the journal, which never names a client
    NAME = auto()  # the name of a client
    SENTENCE = auto()  # any text, which may name a client
    CONDITION = auto()  # an expression of rules; a text in quotation marks may name a client
    METRIC = auto()  # the name of a metric, perhaps with a client's name after a slash


@dataclass(frozen=True)
class ByClient:
    """A mapping whose keys are names of clients."""

    values: Field


@dataclass(frozen=True)
class ByLabel:
    """A mapping whose keys are an operator's labels, which may name a client."""

    values: Field


@dataclass(frozen=True)
class ByWord:
    """A mapping whose keys are words of a program, such as attributes."""

    values: Field


@dataclass(frozen=True)
class Notes:
    """Nested values of a program: keys are words of the program, and any text may name a client."""


@dataclass(frozen=True)
class _Free:
    """Nested values of other programs: any key and any text may name a client."""


FREE = _Free()
Field = TextKind | ByClient | ByLabel | ByWord | Notes | _Free | Mapping[str, "Field"]
"""A mapping says what its values hold, by key. A key that it does not list is free."""

_OWN = TextKind.OWN


def _own(*keys: str) -> dict[str, Field]:
    return dict.fromkeys(keys, _OWN)


_RULES: dict[str, Field] = {
    **_own("failures", "cool_off", "min_separation", "max_participations", "window", "max_in_window", "min_in_window"),
    **_own("budget", "cost"),
    "quotas": ByWord(ByLabel(_OWN)),
    "at_most": ByWord(_OWN),
    "eligible": TextKind.CONDITION,
    "blocked": TextKind.NAME,
    "pinned": TextKind.NAME,
    "paused": ByClient(_OWN),
    "budgets": ByClient(_OWN),
}

ATTRIBUTES: Field = ByClient(Notes())
"""What clients report about themselves."""

META: dict[str, Field] = {
    **_own("seed", "selector", "signals", "audit", "signer", "signature", "fedcohort", "created"),
    **_own("asynchronous"),
    **_own("clients", "blocked"),  # digests
    "rules": _RULES,
    "shadows": ByLabel(_OWN),
    "blind": ByLabel(TextKind.SENTENCE),
    "host": _own("checkpoint", "buffer", "since"),
}
"""By the key in ``meta``."""

EVENTS: dict[str, Field] = {
    events.ABANDONED: {**_own("ticket", "round", "asked", "next"), "reason": TextKind.SENTENCE},
    events.ATTRIBUTES: {"clients": ATTRIBUTES},
    events.CHANGED: {**_own("ticket", "round", "order"), "rules": _RULES},
    events.CORRECTED: {**_own("round"), "corrections": ByClient(TextKind.SENTENCE)},
    events.ENDED: {**_own("state", "rounds", "ticket"), "reason": TextKind.SENTENCE},
    events.EXCLUDED: {**_own("ticket", "codes"), "reasons": TextKind.SENTENCE},
    events.FACTS: _OWN,
    events.FAILURES: {**_own("ticket", "round"), "failures": ByClient(TextKind.SENTENCE)},
    events.FILTER: Notes(),
    events.FORGOTTEN: _OWN,
    events.JOINED: _OWN,
    events.LATE_COUNTED: {**_own("round", "ticket"), "clients": ByClient(_OWN)},
    events.LEFT: _OWN,
    events.PLANNED: _OWN,
    events.PROPOSED: _OWN,
    events.PRUNED: _OWN,
    events.RECOVERED: _OWN,
    events.REFUSED: {**_own("order", "round"), "reason": TextKind.SENTENCE},
    events.REGISTERED: {**_own("ticket"), "names": TextKind.NAME},
    events.REJOINED: _OWN,
    events.SELECTOR: _OWN,
    events.SETTINGS: {
        **_own("cohort-size", "spares", "min-replies", "max-share", "max-update-norm", "strategy", "filter", "signals"),
        "rules": _RULES,
    },
    events.SHADOW: {
        **_own("what", "round", "until", "watch", "selector", "order"),
        **dict.fromkeys(("name", "reason"), TextKind.SENTENCE),
    },
    events.TIMES: _OWN,
    events.TRIED: _OWN,
    events.NEW_MODEL: _OWN,
    events.WAITED: {**_own("ticket", "round", "count", "online", "at_work"), "clients": TextKind.NAME},
}
"""By kind of event. Events of hosts outside this package are free."""

COLUMNS: dict[tuple[str, str], Field] = {
    ("cohorts", "notes"): Notes(),
    ("cohorts", "stop"): TextKind.SENTENCE,
    ("scores", "selector"): TextKind.SENTENCE,  # the label of a shadow
    ("scores", "note"): TextKind.SENTENCE,
    ("states", "selector"): TextKind.SENTENCE,
    ("states", "field"): _OWN,
    ("states", "scalar"): TextKind.SENTENCE,
    ("deltas", "selector"): TextKind.SENTENCE,
    ("deltas", "field"): _OWN,
    ("metrics", "key"): TextKind.METRIC,
    ("meta", "key"): _OWN,
}
"""By table and column, for all other texts."""
