"""A signal is one object: its declaration, and what follows from it."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest

from fedcohort.core.signals import (
    GRADIENT_PASS,
    LOSS_SIGNALS,
    QUERY_SIGNALS,
    SIGNALS,
    TABLE_SIGNALS,
    Known,
    LossMeasure,
    LossOf,
    OnServer,
    Party,
    Pass,
    Signal,
    VectorOf,
    losses_of,
    unaided_signals,
    vectors_of,
)


def test_a_signal_is_a_plain_object_with_a_name() -> None:
    assert Signal.by_name("loss-rms") == Signal.by_name(Signal.LOSS_RMS) == Signal.LOSS_RMS
    assert str(Signal.LOSS_RMS) == Signal.LOSS_RMS.name == f"{Signal.LOSS_RMS}" == "loss-rms"
    assert Signal.LOSS_RMS != "loss-rms" and not isinstance(Signal.LOSS_RMS, str)
    assert sorted([Signal.LOSS, Signal.KEPT]) == [Signal.KEPT, Signal.LOSS]
    assert pickle.loads(pickle.dumps(Signal.LOSS)) == copy.deepcopy(Signal.LOSS) == Signal.LOSS
    with pytest.raises(dataclasses.FrozenInstanceError):
        Signal.LOSS.meaning = "something else"  # type: ignore[misc]
    with pytest.raises(ValueError, match="no-such-signal"):
        Signal.by_name("no-such-signal")
    assert len({(s.known, s.by, s.how, s.meaning) for s in SIGNALS}) == len(SIGNALS)


def test_kinds_follow_from_the_objects() -> None:
    assert {Signal.SIZES, Signal.LABEL_COUNTS, Signal.LABEL_PRODUCTS} == TABLE_SIGNALS
    assert {Signal.LOSS_QUERY, Signal.TRIAL_QUERY} == QUERY_SIGNALS
    assert {
        Signal.LOSS,
        Signal.LOSS_RMS,
        Signal.VALIDATION_LOSS,
        Signal.ROBUST_LOSS,
        Signal.PSEUDO_LOSS,
    } == LOSS_SIGNALS
    known_anyway = {Signal.KEPT, Signal.DURATION, Signal.STALENESS}
    assert known_anyway | set(vectors_of(SIGNALS, "update")) == {s for s in SIGNALS if s.unaided}
    assert {s for s in SIGNALS if s.of_received} == set(losses_of(SIGNALS, "received")) == LOSS_SIGNALS
    sent = {s for s in SIGNALS if s.sent_by_clients}
    assert sent == LOSS_SIGNALS | set(losses_of(SIGNALS, "own"))
    assert {s for s in SIGNALS if s.held_out} == {Signal.VALIDATION_LOSS}


def test_costs_follow_from_how_it_is_computed() -> None:
    assert Signal.LOSS.passes == Signal.ROBUST_LOSS.passes == {Pass("received", "train")}
    assert Signal.LOSS_AFTER.passes == {Pass("own", "train")}
    assert Signal.VALIDATION_LOSS.passes == {Pass("received", "validation")}
    assert Signal.GRADIENT_NORM.passes == Signal.GRADIENT_DISTANCE.passes == {GRADIENT_PASS}
    assert (Pass("own", "train").weight, GRADIENT_PASS.weight) == (1.0, 3.0)
    sent = {s: (s.numbers_sent(10), s.models_sent) for s in SIGNALS if s.reported}
    assert {s for s, cost in sent.items() if cost == (0, 0)} == {s for s in SIGNALS if s.unaided}
    assert sent[Signal.GRADIENT_NORM] == (1, 0) and sent[Signal.GRADIENT_DISTANCE] == (0, 1)


def test_a_signal_declared_elsewhere_is_known_by_how_it_is_computed() -> None:
    far = Signal("how-far", meaning="a length", how=VectorOf("update", "norm"))
    apart = Signal("how-far-apart", meaning="a distance", how=VectorOf("gradient", "distance"))
    steep = Signal("how-steep", meaning="a length", how=VectorOf("gradient", "norm"))
    drawn = Signal("own-sketch", meaning="some numbers", how=VectorOf("update", "sketch"))
    worse = Signal("how-bad", meaning="a loss", how=LossOf(LossMeasure(loss="pseudo")))
    told = Signal("what-it-says", meaning="a number that only the client knows")
    own = Signal("own-loss", meaning="a loss on the server's samples", how=OnServer())
    alone = Signal("alone", meaning="what it adds to nobody", how=OnServer(lambda utility, members, rng: utility([])))
    assert [s.by for s in (far, apart, steep, drawn)] == [Party.SERVER, Party.SERVER, Party.CLIENT, Party.SERVER]
    assert {far, drawn, own} <= unaided_signals() and not {apart, steep, worse, told, alone} & unaided_signals()
    assert own.by is Party.HOST and not own.passes and not own.sent_by_clients and own.numbers_sent(10) == 0
    assert drawn.width == Signal.UPDATE_SKETCH.width and (apart.models_sent, steep.models_sent) == (1, 0)
    assert worse.of_received and worse.sent_by_clients and told.sent_by_clients and not told.of_received
    assert Signal.get("how-far") == far and Signal.get("no-such-signal") is None and Signal.get(3) is None
    with pytest.raises(ValueError, match="'odd-sketch'"):
        Signal("odd-sketch", meaning="some numbers", how=VectorOf("update", "sketch"), width=3)
    with pytest.raises(ValueError, match="LossOf"):
        Signal("odd-how", meaning="some numbers", how="loss")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'norm', .*'nrom'"):
        VectorOf("update", "nrom")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'received', 'own'.*'mine'"):
        LossOf(model="mine")  # type: ignore[arg-type]


def test_the_new_signals_say_everything_about_themselves() -> None:
    assert Signal.LOSS_RMS.how == LossOf(LossMeasure(mean="root-mean-square"))
    assert (Signal.LOSS_RMS.by, Signal.LOSS_RMS.known, Signal.LOSS_RMS.width) == (Party.CLIENT, Known.REPORT, None)
    assert Signal.OUTPUT_BIAS_UPDATE.how == VectorOf("update", "output-bias")
    assert (Signal.OUTPUT_BIAS_UPDATE.by, Signal.OUTPUT_BIAS_UPDATE.width) == (Party.SERVER, "classes")
    assert (Signal.UPDATE_SKETCH.by, Signal.UPDATE_SKETCH.width) == (Party.SERVER, 64)
