"""What the texts of a journal hold, and where clients are named in them. Forgetting a client goes by this.

A client chooses its name, and may choose a word that the journal itself uses: "ticket", "loss", the name of a selector.
Because each field says what it holds, such a word stays where the journal uses it and goes where it names the client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from fedcohort.journal import events


class TextKind(Enum):
    """What a text holds, or a list of them."""

    OWN = auto()  # a word or number of the journal's own; it names no client
    NAME = auto()  # the name of a client
    SENTENCE = auto()  # anything, in which a client may be named
    CONDITION = auto()  # an expression of rules, in which a text in quotation marks may name a client
    METRIC = auto()  # what a number about the model is called, perhaps with a client's name behind a slash


@dataclass(frozen=True)
class ByClient:
    """A mapping whose keys are names of clients."""

    values: Field


@dataclass(frozen=True)
class ByLabel:
    """A mapping whose keys are an operator's own labels, in which a client may be named."""

    values: Field


@dataclass(frozen=True)
class ByWord:
    """A mapping whose keys are words of a program, such as attributes."""

    values: Field


@dataclass(frozen=True)
class Notes:
    """Nested values of a program: the keys are its words, any text in them may name a client."""


@dataclass(frozen=True)
class Free:
    """Nested values of other programs: any key and any text in them may name a client."""


FREE = Free()
Field = TextKind | ByClient | ByLabel | ByWord | Notes | Free | Mapping[str, "Field"]
"""A mapping says what its values hold by key; keys that it does not list are free."""

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
"""What clients say about themselves."""

META: dict[str, Field] = {
    **_own("seed", "selector", "signals", "audit", "chain", "signer", "signature", "fedcohort", "created"),
    **_own("asynchronous"),
    **_own("clients", "blocked"),  # digests
    "rules": _RULES,
    "shadows": ByLabel(_OWN),
    "blind": ByLabel(TextKind.SENTENCE),
    "host": _own("checkpoint", "buffer", "since"),
}
"""By key of ``meta``."""

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
    events.SHADOW: {**_own("what", "round"), "name": TextKind.SENTENCE, "reason": TextKind.SENTENCE},
    events.TIMES: _OWN,
    events.TRIED: _OWN,
    events.NEW_MODEL: _OWN,
}
"""By kind of event; those of hosts outside the package are free."""

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
"""By table and column, for texts that are not described by key or kind."""
