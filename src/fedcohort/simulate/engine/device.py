"""Training and evaluation on one device, all jobs of a call as one stack; on CUDA, each step replayed as a graph.

A step reads its batch from tables on the device at the position of a counter that it advances itself, so one captured
graph serves every step of every round of that shape: no kernel is launched from Python.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fedcohort.arrays import FloatArray, IntArray
from fedcohort.simulate.engine.groups import JobTable
from fedcohort.simulate.engine.losses import logit_derivative, sample_losses
from fedcohort.simulate.engine.stacked import Saved, StackedNet
from fedcohort.simulate.engine.store import Store
from fedcohort.simulate.local import LocalTraining

_MEMORY = 2**27  # elements of activations a forward pass may take when evaluating
_GRAPHS = 24  # captured shapes kept


@dataclass
class _Tables:
    """Everything the steps of one shape read and write; addresses stay, contents change from call to call."""

    vectors: torch.Tensor  # (J, P) weights in the net's order
    minus_gradient: torch.Tensor  # (J, P)
    velocity: torch.Tensor | None  # (J, P)
    pull: torch.Tensor | None  # (J, P) prox * w_global - correction
    counter: torch.Tensor  # (1,) the step to do next
    position: torch.Tensor  # (S, J, B) rows of the data
    label: torch.Tensor  # (S, J, B)
    pseudo: torch.Tensor | None  # (S, J, B)
    scale: torch.Tensor  # (S, J, B, 1) weight of each sample: 1 / batch size, or 0
    rate: torch.Tensor  # (S, J, 1)
    logits: torch.Tensor | None = None  # (J, B, C) of the last step done
    graph: torch.cuda.CUDAGraph | None = None


class DeviceProgram:
    """Stacked training and evaluation on one device.

    Parameters
    ----------
    net : StackedNet
        The architecture.
    store : Store
        The data; copied to the device.
    local : LocalTraining
        What a job does.
    classes : int
        Number of classes.
    device : torch.device
        Where to compute.
    graphs : bool
        Capture each step as a CUDA graph.
    """

    def __init__(
        self,
        net: StackedNet,
        store: Store,
        local: LocalTraining,
        *,
        classes: int,
        device: torch.device,
        graphs: bool = True,
    ) -> None:
        self.net, self.store, self.local, self.classes, self.device = net, store, local, classes, device
        self.graphs = graphs and device.type == "cuda"
        self.x = store.x.to(device)
        self.sample = store.sample.to(device)
        self.label = store.label.to(device)
        self.y_test = store.y_test.to(device)
        self.order = net.order.to(device)
        self.inverse = torch.argsort(net.order).to(device)
        self._tables: dict[tuple[int, int, int, bool, bool], _Tables] = {}

    def close(self) -> None:
        """Let go of the graphs and the data on the device."""
        self._tables.clear()
        self.x = self.x[:0]

    # -- training ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def train(
        self, table: JobTable, models: torch.Tensor, prox: float, correction: torch.Tensor | None
    ) -> tuple[torch.Tensor, FloatArray]:
        """Train every job; return their vectors (J, P) and first losses (J,)."""
        count = len(table)
        run = torch.from_numpy(table.run).to(self.device)
        start = models.index_select(0, run).index_select(1, self.order)
        first = np.full(count, np.nan)
        steps = int(table.steps.max(initial=0))
        if steps == 0:
            return start.index_select(1, self.inverse), first
        width = min(self.local.batch_size, int(table.n.max()))
        jobs = _rounded(count)
        t = self._prepare(jobs, steps, width, prox != 0.0 or correction is not None, prox)
        self._fill(t, table, steps, width, models, run)
        t.vectors[:count] = start
        if t.velocity is not None:
            t.velocity.zero_()
        if t.pull is not None:
            t.pull.zero_()
            if prox:
                t.pull[:count].add_(start, alpha=prox)
            if correction is not None:
                t.pull[:count].sub_(correction.index_select(1, self.order))
        t.counter.zero_()
        if self.graphs and t.graph is None:
            self._capture(t, prox)
        losses = None
        for step in range(steps):
            if t.graph is not None:
                t.graph.replay()
            else:
                self._step(t, prox)
            if step == 0:
                losses = self._first_loss(t, count)
        result = t.vectors[:count].index_select(1, self.inverse)
        if losses is not None:
            busy = table.steps > 0
            first[busy] = losses.cpu().numpy()[busy]
        return result, first

    def _prepare(self, jobs: int, steps: int, width: int, pulled: bool, prox: float) -> _Tables:
        capacity = _rounded(steps)
        key = (jobs, capacity, width, pulled, bool(prox))
        if key not in self._tables:
            if len(self._tables) >= _GRAPHS:
                self._tables.pop(next(iter(self._tables)))
            size, device = len(self.net.order), self.device
            shape = (capacity, jobs, width)

            def vectors() -> torch.Tensor:
                return torch.zeros(jobs, size, device=device)

            self._tables[key] = _Tables(
                vectors=vectors(),
                minus_gradient=vectors(),
                velocity=vectors() if self.local.momentum else None,
                pull=vectors() if pulled else None,
                counter=torch.zeros(1, dtype=torch.int64, device=device),
                position=torch.zeros(shape, dtype=torch.int64, device=device),
                label=torch.zeros(shape, dtype=torch.int64, device=device),
                pseudo=torch.zeros(shape, dtype=torch.int64, device=device) if self.local.loss == "robust" else None,
                scale=torch.zeros(*shape, 1, device=device),
                rate=torch.zeros(capacity, jobs, 1, device=device),
            )
        return self._tables[key]

    def _fill(
        self, t: _Tables, table: JobTable, steps: int, width: int, models: torch.Tensor, run: torch.Tensor
    ) -> None:
        """Draw the batch plans and put them on the device."""
        count = len(table)
        local = np.zeros((steps, count, width), dtype=np.int64)
        counts = np.zeros((steps, count), dtype=np.int64)
        rates = np.zeros((steps, count), dtype=np.float32)
        for job in range(count):
            plan = table.plan(job, self.local)
            done = len(plan.counts)
            if done:
                local[:done, job, : plan.indices.shape[1]] = plan.indices
                counts[:done, job] = plan.counts
                rates[:done, job] = table.rates(job, self.local)
        index = torch.from_numpy(local).to(self.device)
        slots = index + torch.from_numpy(table.first).to(self.device)[None, :, None]
        # Jobs without samples own no slot: what they point at is masked, but must exist.
        slots.clamp_(max=max(len(self.sample) - 1, 0))
        t.position[:steps, :count] = self.sample[slots]
        t.label[:steps, :count] = self.label[slots]
        if t.pseudo is not None:
            self._fill_pseudo(t.pseudo[:steps, :count], index, table, models, run)
        counted = torch.from_numpy(counts).to(self.device)
        inside = torch.arange(width, device=self.device) < counted[:, :, None]
        t.scale.zero_()
        t.scale[:steps, :count, :, 0] = inside / counted.clamp(min=1)[:, :, None]
        t.rate.zero_()
        t.rate[:steps, :count, 0] = torch.from_numpy(rates).to(self.device)

    def _fill_pseudo(
        self, out: torch.Tensor, index: torch.Tensor, table: JobTable, models: torch.Tensor, run: torch.Tensor
    ) -> None:
        for job in range(len(table)):
            first, n = int(table.first[job]), int(table.n[job])
            if n:
                labels = self._logits(models[table.run[job] : table.run[job] + 1], self.sample[first : first + n])
                out[:, job] = labels[0].argmax(1)[index[:, job]]

    def _step(self, t: _Tables, prox: float) -> None:
        """Do the step the counter points at, for all jobs; a job that is done has rate 0."""
        position = t.position.index_select(0, t.counter)[0]
        label = t.label.index_select(0, t.counter)[0]
        scale = t.scale.index_select(0, t.counter)[0]
        rate = t.rate.index_select(0, t.counter)[0]
        jobs, width = position.shape
        x = self.x.index_select(0, position.view(-1)).view(jobs, width, -1)
        saved: Saved = []
        logits = self.net.logits(t.vectors, x, saved)
        t.logits = logits
        pseudo = None if t.pseudo is None else t.pseudo.index_select(0, t.counter)[0]
        delta = logit_derivative(logits, label, pseudo, self.local)
        decay = self.local.weight_decay + prox
        if t.velocity is None:
            # The rate goes into the derivative, so that the whole SGD step is one pass over the weights.
            self.net.backward(t.vectors, saved, delta.mul_(scale * rate.unsqueeze(2)), t.minus_gradient)
            if decay:
                torch.addcmul(t.minus_gradient, t.vectors, 1 - rate * decay, out=t.vectors)
            else:
                t.vectors.add_(t.minus_gradient)
            if t.pull is not None:
                t.vectors.addcmul_(t.pull, rate)
        else:
            self.net.backward(t.vectors, saved, delta.mul_(scale), t.minus_gradient)
            t.velocity.mul_(self.local.momentum).sub_(t.minus_gradient)
            if decay:
                t.velocity.add_(t.vectors, alpha=decay)
            if t.pull is not None:
                t.velocity.sub_(t.pull)
            t.vectors.addcmul_(t.velocity, rate, value=-1)
        t.counter.add_(1)

    def _capture(self, t: _Tables, prox: float) -> None:
        """Warm up on a side stream, then capture one step; the state is put back afterwards."""
        kept = [tensor.clone() for tensor in (t.vectors, t.counter)]
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                t.counter.zero_()
                self._step(t, prox)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        t.counter.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step(t, prox)
        t.graph = graph
        t.vectors.copy_(kept[0])
        t.counter.copy_(kept[1])
        if t.velocity is not None:
            t.velocity.zero_()

    def _first_loss(self, t: _Tables, count: int) -> torch.Tensor:
        assert t.logits is not None
        pseudo = None if t.pseudo is None else t.pseudo[0, :count]
        loss = sample_losses(t.logits[:count], t.label[0, :count], pseudo, self.local)
        return (loss * t.scale[0, :count, :, 0]).sum(1).double()

    # -- evaluation ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _logits(self, models: torch.Tensor, rows: torch.Tensor | slice) -> torch.Tensor:
        """Return the logits (M, V, C) of flat models (M, P) on rows of the data, in chunks that fit the memory."""
        vectors = models.index_select(1, self.order)
        x = self.x[rows]
        step = max(1, _MEMORY // (max(8 * x.shape[1], 1024) * len(models)))
        parts = [self.net.logits(vectors, x[None, start : start + step]) for start in range(0, len(x), step)]
        return torch.cat(parts, 1)

    @torch.no_grad()
    def evaluate(self, models: torch.Tensor) -> tuple[FloatArray, FloatArray]:
        """Return test loss (M,) and accuracy (M,)."""
        logits = self._logits(models, slice(self.store.shape.n_train, None))
        y = self.y_test.expand(len(models), -1)
        loss = sample_losses(logits, y, None, self.local).mean(1, dtype=torch.float64)
        right = (logits.argmax(2) == y).double().mean(1)
        both = torch.stack([loss, right]).cpu().numpy()
        return both[0], both[1]

    def logits(self, models: torch.Tensor, positions: IntArray) -> torch.Tensor:
        """Return the logits (M, V, C) on training samples."""
        return self._logits(models, torch.from_numpy(positions).to(self.device))

    @torch.no_grad()
    def losses(
        self, models: torch.Tensor, queries: IntArray, wanted: dict[str, bool], pseudo_models: torch.Tensor | None
    ) -> FloatArray:
        """Return (Q, 4): loss, validation loss, robust loss, pseudo-label loss; see the engine."""
        out = torch.full((len(queries), 4), float("nan"), dtype=torch.float64, device=self.device)
        ours = wanted["train"] or wanted["robust"] or wanted["pseudo"]
        for run in np.unique(queries[:, 0]):
            mine = np.flatnonzero(queries[:, 0] == run)
            model = models[run : run + 1]
            if ours:
                first, n = queries[mine, 1], queries[mine, 2]
                keep = mine[n > 0]
                if len(keep):
                    slots, owner, sizes = _spans(first[n > 0], n[n > 0], self.device)
                    by_label, logits = self._cross_entropy(model, slots)
                    out[keep, 0] = _means(by_label, owner, sizes)
                    if wanted["robust"] or wanted["pseudo"]:
                        teacher = logits
                        if pseudo_models is not None:
                            teacher = self._logits(pseudo_models[run : run + 1], self.sample[slots])[0]
                        labels = teacher.argmax(1)
                        robust = sample_losses(logits, self.label[slots], labels, self.local)
                        out[keep, 2] = _means(robust, owner, sizes)
                        out[keep, 3] = _means(sample_losses(logits, labels, None, self.local), owner, sizes)
            if wanted["validation"]:
                first, n = queries[mine, 1] + queries[mine, 2], queries[mine, 3] - queries[mine, 2]
                keep = mine[n > 0]
                if len(keep):
                    slots, owner, sizes = _spans(first[n > 0], n[n > 0], self.device)
                    out[keep, 1] = _means(self._cross_entropy(model, slots)[0], owner, sizes)
        return np.asarray(out.cpu().numpy())

    def _cross_entropy(self, model: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self._logits(model, self.sample[slots])[0]
        return sample_losses(logits, self.label[slots], None, self.local), logits

    @torch.no_grad()
    def gradients(self, models: torch.Tensor, queries: IntArray) -> torch.Tensor:
        """Return the full-batch gradients (Q, P)."""
        count = len(queries)
        total = torch.zeros(count, len(self.order), device=self.device)
        if not count:
            return total
        vectors = models.index_select(0, torch.from_numpy(queries[:, 0]).to(self.device)).index_select(1, self.order)
        part = torch.empty_like(total)
        n, largest = queries[:, 2], int(queries[:, 2].max())
        step = max(1, min(largest, _MEMORY // (max(16 * self.x.shape[1], 1024) * count)))
        for start in range(0, largest, step):
            offsets = np.arange(start, min(start + step, largest))
            inside = offsets[None] < n[:, None]
            slots = torch.from_numpy(np.where(inside, queries[:, 1:2] + offsets[None], queries[:, 1:2])).to(self.device)
            slots.clamp_(max=len(self.sample) - 1)
            weight = torch.from_numpy((inside / np.maximum(n, 1)[:, None]).astype(np.float32)).to(self.device)
            x = self.x.index_select(0, self.sample[slots].view(-1)).view(count, len(offsets), -1)
            saved: Saved = []
            delta = logit_derivative(self.net.logits(vectors, x, saved), self.label[slots], None, self.local)
            self.net.backward(vectors, saved, delta.mul_(weight.unsqueeze(2)), part)
            total.sub_(part)
        return total.index_select(1, self.inverse)


def _rounded(count: int) -> int:
    """Round up, so that calls of nearly the same shape share one graph."""
    grain = 1 if count <= 16 else 4 if count <= 64 else 8 if count <= 256 else 32
    return -(-count // grain) * grain


def _spans(first: IntArray, n: IntArray, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the slots of all spans one after the other, whose each is, and the sizes."""
    ends = np.cumsum(n)
    slots = np.arange(ends[-1]) + np.repeat(first - (ends - n), n)
    owner = np.repeat(np.arange(len(n)), n)
    return torch.from_numpy(slots).to(device), torch.from_numpy(owner).to(device), torch.from_numpy(n).to(device)


def _means(values: torch.Tensor, owner: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Return the mean of each owner's values; by segments, which is the same twice (atomic sums are not)."""
    return torch.segment_reduce(values.double(), "sum", lengths=sizes) / sizes
