"""What each text of a journal holds, and where it may name a client. Forgetting a client depends on this.

A client chooses its own name, which may be a word that the journal uses: "ticket", "loss", the name of a selector.
Since each field declares what it holds, such a word is removed only where it names the client.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import NamedTuple

from fedcohort.journal import events


class TextKind(Enum):
    """What a text, or each text of a list, holds."""

    OWN = auto()  # a word or number of the journal, which never names a client
    NAME = auto()  # the name of a client
    SENTENCE = auto()  # any text, which may name a client
    CONDITION = auto()  # an expression of rules; a text in quotation marks may name a client
    METRIC = auto()  # the name of a metric, perhaps with a client's name after a slash
    NOTES = auto()  # nested values of a program: keys are words of the program, and any text may name a client
    FREE = auto()  # nested values of other programs: any key and any text may name a client


class Keyed(NamedTuple):
    """A mapping with any keys of one kind: names of clients, an operator's labels, or words of a program."""

    keys: TextKind
    values: Field


Field = TextKind | Keyed | Mapping[str, "Field"]
"""A mapping says what its values hold, by key. A key that it does not list is free."""

_OWN, _NAME, _SENTENCE = TextKind.OWN, TextKind.NAME, TextKind.SENTENCE


def _own(*keys: str) -> dict[str, Field]:
    return dict.fromkeys(keys, _OWN)


_RULES: dict[str, Field] = {
    **_own("failures", "cool_off", "min_separation", "max_participations", "window", "max_in_window", "min_in_window"),
    **_own("budget", "cost"),
    "quotas": Keyed(_OWN, Keyed(_SENTENCE, _OWN)),
    "at_most": Keyed(_OWN, _OWN),
    "eligible": TextKind.CONDITION,
    "blocked": _NAME,
    "pinned": _NAME,
    "paused": Keyed(_NAME, _OWN),
    "budgets": Keyed(_NAME, _OWN),
}

ATTRIBUTES: Field = Keyed(_NAME, TextKind.NOTES)
"""What clients report about themselves."""

META: dict[str, Field] = {
    **_own("seed", "selector", "signals", "audit", "signer", "signature", "fedcohort", "created"),
    **_own("asynchronous"),
    **_own("clients", "blocked"),  # digests
    "rules": _RULES,
    "shadows": Keyed(_SENTENCE, _OWN),
    "blind": Keyed(_SENTENCE, _SENTENCE),
    "host": _own("checkpoint", "buffer", "since"),
}
"""By the key in ``meta``."""

EVENTS: dict[str, Field] = {
    events.ABANDONED: {**_own("ticket", "round", "asked", "next"), "reason": _SENTENCE},
    events.ATTRIBUTES: {"clients": ATTRIBUTES},
    events.CHANGED: {**_own("ticket", "round", "order"), "rules": _RULES},
    events.CORRECTED: {**_own("round"), "corrections": Keyed(_NAME, _SENTENCE)},
    events.ENDED: {**_own("state", "rounds", "ticket"), "reason": _SENTENCE},
    events.EXCLUDED: {**_own("ticket", "codes"), "reasons": _SENTENCE},
    events.FACTS: _OWN,
    events.FAILURES: {**_own("ticket", "round"), "failures": Keyed(_NAME, _SENTENCE)},
    events.FILTER: TextKind.NOTES,
    events.FORGOTTEN: _OWN,
    events.JOINED: _OWN,
    events.LATE_COUNTED: {**_own("round", "ticket"), "clients": Keyed(_NAME, _OWN)},
    events.LEFT: _OWN,
    events.PLANNED: _OWN,
    events.PROPOSED: _OWN,
    events.PRUNED: _OWN,
    events.RECOVERED: _OWN,
    events.REFUSED: {**_own("order", "round"), "reason": _SENTENCE},
    events.REGISTERED: {**_own("ticket"), "names": _NAME},
    events.REJOINED: _OWN,
    events.SELECTOR: _OWN,
    events.SETTINGS: {
        **_own("cohort-size", "spares", "min-replies", "max-share", "max-update-norm", "strategy", "filter", "signals"),
        "rules": _RULES,
    },
    events.SHADOW: {
        **_own("what", "round", "until", "watch", "selector", "order"),
        **dict.fromkeys(("name", "reason"), _SENTENCE),
    },
    events.TIMES: _OWN,
    events.TRIED: _OWN,
    events.NEW_MODEL: _OWN,
    events.WAITED: {**_own("ticket", "round", "count", "online", "at_work"), "clients": _NAME},
}
"""By kind of event. Events of hosts outside this package are free."""

COLUMNS: dict[tuple[str, str], Field] = {
    ("cohorts", "notes"): TextKind.NOTES,
    ("cohorts", "stop"): _SENTENCE,
    ("scores", "selector"): _SENTENCE,  # the label of a shadow
    ("scores", "note"): _SENTENCE,
    ("states", "selector"): _SENTENCE,
    ("states", "field"): _OWN,
    ("states", "scalar"): _SENTENCE,
    ("deltas", "selector"): _SENTENCE,
    ("deltas", "field"): _OWN,
    ("metrics", "key"): TextKind.METRIC,
    ("meta", "key"): _OWN,
}
"""By table and column, for all other texts."""
