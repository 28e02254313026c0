"""The sections of a configuration that are plain options: data, model and run."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from fedcohort.core.params import Boolean, Either, Interval, OneOf, Optional, Parameterized, Text, param
from fedcohort.core.params import Sequence as ListOf
from fedcohort.hosts.round import LATE_REPLIES
from fedcohort.simulate.data import Digits, Source


@dataclass(frozen=True, kw_only=True)
class DataOptions(Parameterized):
    """The section ``[data]``. Its other keys are parameters of the dataset."""

    name: str = param("digits", Text(), "a dataset of fedcohort.simulate.data")
    folder: str | None = param(None, Optional(Text()), "where datasets are stored; None: the usual places")
    download: bool = param(False, Boolean(), "download the dataset if it is not found")
    # Built from the section's other keys.
    source: Source = field(default_factory=Digits)

    @cached_property
    def names_clients(self) -> bool:
        """Whether the data say which client each sample belongs to; for a file, this reads its head."""
        return self.source.names_clients(self.folder)  # cached, because several settings ask


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Parameterized):
    """The section ``[model]``."""

    name: str = param("mlp", Text(), "a registered model, or your own module: file.py:Class or module:Class")


@dataclass(frozen=True, kw_only=True)
class RunOptions(Parameterized):
    """The section ``[run]``."""

    # When a run ends. Whatever comes first counts.
    rounds: int = param(100, Interval(int, 1, 10**7), "rounds of training")
    seconds: float | None = param(
        None,
        Optional(Interval(float, 0, None, "neither")),
        "simulated seconds after which a run ends, once its current round is over; None: after its rounds",
    )
    # How many clients work, and when a round closes.
    cohort: int | str = param(
        10,
        Either(Interval(int, 1, None), OneOf(("all",))),
        "clients per round; with mode 'async', clients at work at the same time",
    )
    mode: str = param(
        "sync",
        OneOf(("sync", "async")),
        "'sync': rounds; 'async': clients are replaced one by one, and a round lasts until there is a new model",
    )
    buffer: int = param(1, Interval(int, 1, None), "with mode 'async', answers per model (FedBuff's K)")
    period: float | None = param(
        None,
        Optional(Interval(float, 0, None, "neither")),
        "with mode 'async', simulated seconds between two models, instead of 'buffer'",
    )
    max_answers: int = param(
        2,
        Interval(int, 1, None),
        "with mode 'async', how many of as many successive answers as clients are online may be one client's",
    )
    spares: int = param(
        0, Interval(int, 0, None), "extra clients per round, which closes with the first 'cohort' answers"
    )
    deadline: Literal["auto"] | None = param(
        None,
        Optional(OneOf(("auto",))),
        "'auto': every round gets the deadline, and at most 'spares' spares, that made models fastest so far; "
        "for a fixed deadline use scenario.deadline",
    )
    leave_out_slow: bool = param(
        False,
        Boolean(),
        "whether an automatic deadline may leave out more than a fifth of the clients that ever answered",
    )
    late: Literal["discard", "count"] = param(
        "discard",
        LATE_REPLIES,
        "what happens to models that arrive after their round has closed: 'count' averages them in the next round",
    )
    # What is measured, and how it is reported.
    eval_every: int = param(
        1, Interval(int, 1, None), "rounds between evaluations on the test set; the last is always evaluated"
    )
    targets: tuple[float, ...] = param(
        (), ListOf(Interval(float, None, None)), "accuracies, or values of the task's metric, for rounds-to-target"
    )
    terminal: int | None = param(
        None,
        Optional(Interval(int, 1, None)),
        "last rounds that terminal accuracy averages; None: 50, or a fifth of a run shorter than 250",
    )
    patience: int | None = param(
        None,
        Optional(Interval(int, 1, None)),
        "stop a run after this many rounds in a row with rising validation and falling training loss (FLASH, Sec. 3.2)",
    )
    baseline: str | None = param(
        None, Optional(Text()), "label that others are compared with; None: uniform, or the first"
    )
    reference: str | None = param(
        None, Optional(Text()), "setting with IID data, against which improvement is measured"
    )
    shadows: tuple[str, ...] = param(
        (), ListOf(Text()), "labels of selectors that shadow every run; what they would have picked is recorded"
    )
    # Where and how it is computed. Other devices and precisions round differently.
    device: str = param("auto", Text(), "auto, cpu, cuda or cuda:N")
    workers: int | None = param(
        None, Optional(Interval(int, 1, 4096)), "threads for CPU training; None: one per usable core"
    )
    processes: int | None = param(
        None,
        Optional(Interval(int, 1, 1024)),
        "processes that share the runs; None: as many as are fastest",
    )
    precision: str = param(
        "tf32",
        OneOf(("tf32", "single", "bf16")),
        "tf32: on CUDA, round the factors of matrix products to TF32; single: full; bf16: train in bfloat16",
    )
    lockstep: int = param(256, Interval(int, 1, None), "most runs that advance together; further runs take turns")
    checkpoint_seconds: float = param(30.0, Interval(float, 0, None), "seconds between checkpoints; 0: every round")
    engine: str = param("local", OneOf(("local", "ray")), "where runs are executed")

    @property
    def size(self) -> int | None:
        """Clients per round; None means all that are available."""
        return None if isinstance(self.cohort, str) else int(self.cohort)
