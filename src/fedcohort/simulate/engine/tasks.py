"""The work of one engine call, cut into units that any process can do: the parent alone, or with its workers.

A unit's result depends on nothing but the unit, so it does not matter who does it, and doing one twice is harmless.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import nn

from fedcohort.simulate.engine.dense import DenseProgram, dense_sides
from fedcohort.simulate.engine.flat import FlatModel
from fedcohort.simulate.engine.groups import JobTable, TrainTask
from fedcohort.simulate.engine.layers import read_layers
from fedcohort.simulate.engine.losses import robust_of
from fedcohort.simulate.engine.program import CHUNK, ModuleProgram, Program
from fedcohort.simulate.engine.store import Store
from fedcohort.simulate.local import LocalTraining

EVALUATION_CHUNK = 2 * CHUNK  # test samples of one unit


@dataclass
class Work:
    """One engine call: its kind, its tensors by name (inputs and outputs) and a few numbers."""

    kind: str
    units: int
    tensors: dict[str, torch.Tensor]
    numbers: dict[str, float] = field(default_factory=dict)
    blocks: dict[str, str] = field(default_factory=dict)  # in which shared block a tensor lies, where not in its own


def choose_program(module: nn.Module, sample: tuple[int, ...], local: LocalTraining) -> Program:
    """Return the CPU program made of torch's operators that trains ``module`` fastest."""
    flat = FlatModel(module)
    layers = None if flat.stateful else read_layers(flat, sample)
    sides = None if layers is None else dense_sides(layers)
    return ModuleProgram(flat, sample, local) if sides is None else DenseProgram(flat, sample, local, sides)


class Executor:
    """Does units of work on one store with one program."""

    def __init__(self, store: Store, program: Program) -> None:
        self.store = store
        self.program = program
        self._do: dict[str, Callable[[Work, int], None]] = {
            "losses": self._losses,
            "gradients": self._gradients,
            "evaluate": self._evaluate,
            "logits": self._logits,
        }

    def run(self, work: Work, claims: torch.Tensor, start: int) -> None:
        """Do every unit nobody has claimed, beginning with ``start``.

        Claims are plain bytes, not locks: in the rare race two processes do the same unit and write the same numbers.
        """
        do = self._training(work) if work.kind == "train" else functools.partial(self._do[work.kind], work)
        claimed = claims.numpy()
        with torch.no_grad():
            for unit in (*range(start, work.units), *range(start)):
                if not claimed[unit]:
                    claimed[unit] = 1
                    do(unit)

    def _training(self, work: Work) -> Callable[[int], None]:
        t = work.tensors
        order, bounds = t["order"].numpy(), t["bounds"].tolist()
        every = TrainTask(
            table=JobTable(*t["table"].numpy()),
            jobs=order,
            models=t["models"],
            out=t["out"],
            first_loss=t["first_loss"].numpy(),
            prox=work.numbers["prox"],
            correction=t.get("correction"),
        )

        def train(unit: int) -> None:
            self.program.train(replace(every, jobs=order[bounds[unit] : bounds[unit + 1]]), self.store)

        return train

    def _losses(self, work: Work, unit: int) -> None:
        t, wanted = work.tensors, work.numbers
        run, first, n, size = t["queries"][unit].tolist()
        out = t["numbers"][unit].numpy()
        model = t["models"][run]
        if n and (wanted["train"] or wanted["robust"] or wanted["pseudo"]):
            x, y = self._samples(first, first + n)
            logits = self.program.scores(model, x)
            normaliser = logits.logsumexp(0)
            by_label = normaliser - logits.gather(0, y[None])[0]
            out[0] = float(by_label.mean(dtype=torch.float64))
            if wanted["robust"] or wanted["pseudo"]:
                teacher = self.program.scores(t["pseudo_models"][run], x) if "pseudo_models" in t else logits
                by_pseudo = normaliser - logits.gather(0, teacher.argmax(0)[None])[0]
                robust = robust_of(by_label, by_pseudo, self.program.local)
                out[2] = float(robust.mean(dtype=torch.float64))
                out[3] = float(by_pseudo.mean(dtype=torch.float64))
        if size > n and wanted["validation"]:
            x, y = self._samples(first + n, first + size)
            logits = self.program.scores(model, x)
            out[1] = float((logits.logsumexp(0) - logits.gather(0, y[None])[0]).mean(dtype=torch.float64))

    def _gradients(self, work: Work, unit: int) -> None:
        t = work.tensors
        run, first, n, _ = t["queries"][unit].tolist()
        if n == 0:
            t["out"][unit].zero_()
            return
        x, y = self._samples(first, first + n)
        self.program.gradient(t["models"][run], x, y, t["out"][unit])

    def _evaluate(self, work: Work, unit: int) -> None:
        t = work.tensors
        chunks = int(work.numbers["chunks"])
        model, chunk = divmod(unit, chunks)
        rows = slice(chunk * EVALUATION_CHUNK, (chunk + 1) * EVALUATION_CHUNK)
        y = self.store.y_test[rows]
        logits = self.program.scores(t["models"][model], self.store.x_test[rows])
        loss = (logits.logsumexp(0) - logits.gather(0, y[None])[0]).sum(dtype=torch.float64)
        t["numbers"][unit, 0], t["numbers"][unit, 1] = loss, (logits.argmax(0) == y).sum()

    def _logits(self, work: Work, unit: int) -> None:
        t = work.tensors
        model, chunk = divmod(unit, int(work.numbers["chunks"]))
        rows = slice(chunk * EVALUATION_CHUNK, (chunk + 1) * EVALUATION_CHUNK)
        x = self.store.x[t["positions"][rows].to(self.store.x.device)]
        t["out"][model, rows] = self.program.scores(t["models"][model], x).t()

    def _samples(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.store.x[self.store.sample[start:stop]], self.store.label[start:stop]


def train_work(
    table: JobTable, program: Program, prox: float, tensor: Callable[..., torch.Tensor], has_correction: bool, rows: int
) -> Work:
    """Lay out the tensors of a training call; the caller adds ``out``, and fills ``models`` and ``correction``."""
    groups = table.groups(program.group_size, program.local)
    count, size = len(table), program.flat.n_params
    tensors = {
        "table": tensor("table", torch.int64, (len(JobTable.FIELDS), count)),
        "order": tensor("order", torch.int64, (count,)),
        "bounds": tensor("bounds", torch.int64, (len(groups) + 1,)),
        "models": tensor("models", torch.float32, (rows, size)),
        "first_loss": tensor("first_loss", torch.float64, (count,)),
    }
    if has_correction:
        tensors["correction"] = tensor("correction", torch.float32, (count, size))
    for row, name in enumerate(JobTable.FIELDS):
        tensors["table"][row] = torch.from_numpy(getattr(table, name))
    if groups:
        tensors["order"].copy_(torch.from_numpy(np.concatenate(groups)))
    tensors["bounds"].copy_(torch.from_numpy(np.cumsum([0, *(len(group) for group in groups)])))
    tensors["first_loss"].fill_(float("nan"))
    return Work("train", len(groups), tensors, {"prox": float(prox)})
