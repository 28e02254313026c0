"""Signals: the kinds of facts a selector may need, each declared before it is read.

A selector lists what it needs in ``requires``. A host lists what it can supply. A session refuses to start when the
two do not fit, so nobody finds out in round 300; and a selector that reads what it did not declare gets an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


@dataclass(frozen=True)
class Measure:
    """One number of a model on a client's samples: a mean of a loss, without any training.

    Parameters
    ----------
    part : "train" or "validation"
        Which of the client's samples.
    loss : "label", "pseudo" or "robust"
        Cross-entropy with the client's labels, with pseudo-labels (the classes a reference model predicts), or FLASH's
        noise-robust loss, which is made of both.
    mean : "mean" or "root-mean-square"
        How the samples' losses become one number.
    """

    part: Literal["train", "validation"] = "train"
    loss: Literal["label", "pseudo", "robust"] = "label"
    mean: Literal["mean", "root-mean-square"] = "mean"


class Signal(StrEnum):
    """A kind of fact about clients."""

    # Facts of the client table, known before the first round.
    SIZES = "sizes"
    LABEL_COUNTS = "label-counts"
    LABEL_PRODUCTS = "label-products"
    # Facts of a round's report, one number per client of the cohort.
    KEPT = "kept"
    DURATION = "duration"
    LOSS = "loss"
    LOSS_AFTER = "loss-after"
    VALIDATION_LOSS = "validation-loss"
    ROBUST_LOSS = "robust-loss"
    ROBUST_LOSS_AFTER = "robust-loss-after"
    PSEUDO_LOSS = "pseudo-loss"
    PSEUDO_LOSS_AFTER = "pseudo-loss-after"
    UPDATE_NORM = "update-norm"
    UPDATE_DISTANCE = "update-distance"
    GRADIENT_NORM = "gradient-norm"
    GRADIENT_DISTANCE = "gradient-distance"
    # Questions a host can answer before a cohort is chosen.
    LOSS_QUERY = "loss-query"
    TRIAL_QUERY = "trial-query"
    # What a trial is answered with.
    LOSS_CHANGE = "loss-change"

    @property
    def meaning(self) -> str:
        """One sentence: what the number is."""
        return _TEXT[self][0]

    @property
    def supplied_by(self) -> str:
        """What a host does to supply it."""
        return _TEXT[self][1]


TABLE_SIGNALS = frozenset({Signal.SIZES, Signal.LABEL_COUNTS, Signal.LABEL_PRODUCTS})
QUERY_SIGNALS = frozenset({Signal.LOSS_QUERY, Signal.TRIAL_QUERY})
REPORT_SIGNALS = frozenset(Signal) - TABLE_SIGNALS - QUERY_SIGNALS - {Signal.LOSS_CHANGE}
LOSS_SIGNALS = frozenset({Signal.LOSS, Signal.VALIDATION_LOSS, Signal.ROBUST_LOSS, Signal.PSEUDO_LOSS})

_IN_REPORT = "add it to RoundReport.metrics for the clients of the cohort"
_TEXT: dict[Signal, tuple[str, str]] = {
    Signal.SIZES: ("number of training samples of each client", "pass sizes=... to ClientTable"),
    Signal.LABEL_COUNTS: ("samples per class of each client", "pass labels=LabelCounts(...) to ClientTable"),
    Signal.LABEL_PRODUCTS: (
        "inner products of the clients' label counts",
        "pass labels=LabelCounts(...), LabelFactor(...) or LabelGram(...) to ClientTable",
    ),
    Signal.KEPT: ("whether the filter kept the client's model in the average", "set RoundReport.kept"),
    Signal.DURATION: ("seconds from sending the model to receiving the update", _IN_REPORT),
    Signal.LOSS: ("mean training loss of the received global model on the client's data", _IN_REPORT),
    Signal.LOSS_AFTER: ("mean training loss of the client's own model after local training", _IN_REPORT),
    Signal.VALIDATION_LOSS: ("loss of the received global model on the client's held-out data", _IN_REPORT),
    Signal.ROBUST_LOSS: ("noise-robust loss of the received global model on the client's data", _IN_REPORT),
    Signal.ROBUST_LOSS_AFTER: ("noise-robust loss of the client's own model after local training", _IN_REPORT),
    Signal.PSEUDO_LOSS: ("cross-entropy of the received global model against its own pseudo-labels", _IN_REPORT),
    Signal.PSEUDO_LOSS_AFTER: (
        "cross-entropy of the client's own model after training against the received model's pseudo-labels",
        _IN_REPORT,
    ),
    Signal.UPDATE_NORM: ("L2 norm of the client's model update", _IN_REPORT),
    Signal.UPDATE_DISTANCE: ("L2 distance of the client's update to the mean update of the cohort", _IN_REPORT),
    Signal.GRADIENT_NORM: ("L2 norm of the client's full-batch gradient at the received model", _IN_REPORT),
    Signal.GRADIENT_DISTANCE: (
        "L2 distance of the client's full-batch gradient at the received model to the cohort's mean gradient",
        _IN_REPORT,
    ),
    Signal.LOSS_QUERY: (
        "losses of the current global model on clients the selector names, before it chooses",
        "answer the Losses that session.query returns and list this signal in the session's signals",
    ),
    Signal.TRIAL_QUERY: (
        "the loss change of every client if given cohorts were trained and averaged, then thrown away",
        "answer the Trial that session.query returns and list this signal in the session's signals",
    ),
    Signal.LOSS_CHANGE: ("change of a client's loss caused by a trial cohort", "answer a Trial"),
}
