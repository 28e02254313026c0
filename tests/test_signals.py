"""A signal is one object: what is said about it, what follows from it, and who else may know it by name."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path

import pytest

import fedcohort
from fedcohort.signals import (
    GRADIENT_PASS,
    LOSS_SIGNALS,
    QUERY_SIGNALS,
    REPORT_SIGNALS,
    TABLE_SIGNALS,
    UNAIDED_SIGNALS,
    Known,
    LossOf,
    Measure,
    Party,
    Pass,
    Signal,
    VectorOf,
    losses_of,
    same_of_received,
    vectors_of,
)

SOURCES = Path(fedcohort.__file__).parent


def test_a_signal_is_its_name() -> None:
    assert Signal("loss-rms") is Signal.LOSS_RMS
    assert str(Signal.LOSS_RMS) == Signal.LOSS_RMS.value == f"{Signal.LOSS_RMS}" == "loss-rms"
    assert {"loss-rms": 1}[Signal.LOSS_RMS] == 1
    assert sorted([Signal.LOSS, Signal.KEPT]) == [Signal.KEPT, Signal.LOSS]
    assert pickle.loads(pickle.dumps(Signal.LOSS)) is copy.deepcopy(Signal.LOSS) is Signal.LOSS
    with pytest.raises(ValueError, match="no-such-signal"):
        Signal("no-such-signal")
    assert len({(s.known, s.by, s.how, s.meaning) for s in Signal}) == len(Signal)


def test_kinds_follow_from_the_objects() -> None:
    assert {Signal.SIZES, Signal.LABEL_COUNTS, Signal.LABEL_PRODUCTS} == TABLE_SIGNALS
    assert {Signal.LOSS_QUERY, Signal.TRIAL_QUERY} == QUERY_SIGNALS
    assert set(Signal) - TABLE_SIGNALS - QUERY_SIGNALS - {Signal.LOSS_CHANGE} == REPORT_SIGNALS
    assert {
        Signal.LOSS,
        Signal.LOSS_RMS,
        Signal.VALIDATION_LOSS,
        Signal.ROBUST_LOSS,
        Signal.PSEUDO_LOSS,
    } == LOSS_SIGNALS
    assert {Signal.KEPT, Signal.DURATION, Signal.SERVER_LOSS, *vectors_of(Signal, "update")} == UNAIDED_SIGNALS
    after = losses_of(Signal, "own")
    assert {same_of_received(s).value + "-after" for s in after} == {s.value for s in after}
    assert {s for s in Signal if s.held_out} == {Signal.VALIDATION_LOSS}


def test_costs_follow_from_how_it_is_computed() -> None:
    assert Signal.LOSS.passes == Signal.ROBUST_LOSS.passes == {Pass("received", "train")}
    assert Signal.LOSS_AFTER.passes == {Pass("own", "train")}
    assert Signal.VALIDATION_LOSS.passes == {Pass("received", "validation")}
    assert Signal.GRADIENT_NORM.passes == Signal.GRADIENT_DISTANCE.passes == {GRADIENT_PASS}
    assert (Pass("own", "train").weight, GRADIENT_PASS.weight) == (1.0, 3.0)
    sent = {s: (s.numbers_sent(10), s.models_sent) for s in REPORT_SIGNALS}
    assert {s for s, cost in sent.items() if cost == (0, 0)} == UNAIDED_SIGNALS
    assert sent[Signal.GRADIENT_NORM] == (1, 0) and sent[Signal.GRADIENT_DISTANCE] == (0, 1)


def test_the_new_signals_say_everything_about_themselves() -> None:
    assert Signal.LOSS_RMS.how == LossOf(Measure(mean="root-mean-square"))
    assert (Signal.LOSS_RMS.by, Signal.LOSS_RMS.known, Signal.LOSS_RMS.width) == (Party.CLIENT, Known.REPORT, None)
    assert Signal.OUTPUT_BIAS_UPDATE.how == VectorOf("update", "output-bias")
    assert (Signal.OUTPUT_BIAS_UPDATE.by, Signal.OUTPUT_BIAS_UPDATE.width) == (Party.SERVER, "classes")
    assert (Signal.UPDATE_SKETCH.by, Signal.UPDATE_SKETCH.width) == (Party.SERVER, 64)


# Who mentions a signal by name outside signals.py and selectors/, and why no object could say it for them.
MENTIONS = {
    # Facts of the client table, where its columns are read and written, and where Flower's clients describe themselves.
    "clients.py": {"sizes", "label-counts", "label-products"},
    "flower/roster.py": {"sizes", "label-counts", "label-products"},
    "flower/population.py": {"sizes", "label-counts", "label-products"},
    "flower/wire.py": {"label-counts"},
    "journal/tables.py": {"label-products"},
    "continuing.py": {"sizes", "label-products"},
    "replay.py": {"sizes", "label-products"},
    "testing/snapshot.py": {"label-products"},
    "report/account.py": {"sizes", "label-counts", "label-products"},
    "simulate/run.py": {"sizes", "label-counts", "label-products", "server-loss"},
    # Figures of the papers that are about these signals.
    "reproduce/fedacs.py": {"gradient-distance"},
    "reproduce/flash.py": {"robust-loss", "validation-loss"},
    # The two questions, what they measure, and the field of an outcome that is not a number.
    "protocol.py": {"kept", "loss", "loss-query", "loss-change", "trial-query"},
    # Host clocks: nobody computes a duration from a model.
    "simulate/batch.py": {"duration"},
    # Is a selector itself, of trials only.
    "simulate/diagnose.py": {"trial-query", "loss-change"},
    "flower/replies.py": {"duration", "server-loss"},
    # Rules that are about these losses and no others: early stopping, a column of the results, a default.
    "early_stop.py": {"loss", "validation-loss"},
    "simulate/group.py": {"loss", "server-loss"},
    # What the server sees on samples of its own: computed, never told.
    "flower/rounds.py": {"server-loss"},
    "flower/client.py": {"loss"},
    "aggregators/distillation.py": {"robust-loss", "robust-loss-after"},  # what RHFL weighs clients by
    # A selector that learns from a filter gets one.
    "cli/flower.py": {"kept"},
    "flower/strategy.py": {"kept", "server-loss"},
    "simulate/config.py": {"kept"},
}


def test_who_mentions_a_signal_by_name() -> None:
    """A new signal must not need a place in any of these; a file that comes to this list needs a reason."""
    by_name = re.compile(r"Signal\.(" + "|".join(s.name for s in Signal) + r")\b")
    # Names that are ordinary words ("loss", "kept", ...) are also keys of other tables.
    strings = re.compile("[\"'`](" + "|".join(s.value for s in Signal if "-" in s.value) + ")[\"'`]")
    found: dict[str, set[str]] = {}
    for path in sorted(SOURCES.rglob("*.py")):
        where = path.relative_to(SOURCES).as_posix()
        if where == "signals.py" or where.startswith("selectors/"):
            continue
        text = path.read_text()
        names = {Signal[name].value for name in by_name.findall(text)} | set(strings.findall(text))
        if names:
            found[where] = names
    assert found == MENTIONS
