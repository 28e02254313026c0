"""Train and evaluate on one device, with all jobs of a call as one stack; on CUDA the steps are replayed as a graph.

All steps of a round (or as many as fit) are captured as one graph that reads its batches from tables on the device. A
round is then a small upload and one launch, and nothing waits for the device until a result is read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.simulate.engine.crops import crop, crop_table
from fedcohort.simulate.engine.jobs import JobTable
from fedcohort.simulate.engine.layer_rules import stream_keys
from fedcohort.simulate.engine.layers import Saved
from fedcohort.simulate.engine.modules import ModuleBackend
from fedcohort.simulate.engine.precision import products
from fedcohort.simulate.engine.stacked import FunctionalNet, LayerNet, StackedNet
from fedcohort.simulate.engine.store import Store
from fedcohort.simulate.engine.types import Spans
from fedcohort.training.local import LocalTraining, plan_counts
from fedcohort.training.losses import cross_entropy, logit_derivative

log = logging.getLogger(__name__)
Losses = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_UNROLLED = 40  # most steps in one graph
_MEMORY = 2**27  # most elements of activations in a forward pass during evaluation
_GRAPHS = 8  # captured shapes to keep
_FLAT = 32  # with fewer jobs than this, a step on a GPU is no faster


@dataclass
class _StepBuffers:
    """Everything that the U steps of one graph read and write; each replay has new contents at the same addresses."""

    vectors: torch.Tensor  # (J, Q) weights in the net's order
    weights: torch.Tensor  # (J, T) the part of the vectors that is trained
    gradient: torch.Tensor  # (J, T) times minus the rate without momentum, otherwise times -1
    velocity: torch.Tensor | None  # (J, T)
    pull: torch.Tensor | None  # (J, T) prox * w_global - correction
    slots: torch.Tensor  # (U, J, B) the slots of each batch
    pseudo: torch.Tensor | None  # (U, J, B) pseudo-labels
    crops: torch.Tensor | None  # (U, J, B) how to augment the images
    keys: torch.Tensor | None  # (U, J) of random layers
    numbers: torch.Tensor  # (U, J, B + 1) factor of each sample's derivative, 0 for padding; then the rate
    widths: tuple[int, ...]  # (U,) size of the batches, padding included
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
    precision : str
        "single", "tf32" or "bf16".
    losses : function, optional
        Loss of each sample (n,), from outputs and targets; default: a classifier's cross-entropy.
    """

    def __init__(
        self,
        net: StackedNet,
        store: Store,
        local: LocalTraining,
        *,
        classes: int,
        device: torch.device,
        precision: str = "single",
        losses: Losses | None = None,
    ) -> None:
        self.net, self.local, self.classes, self.device = net, local, classes, device
        self.precision, self.losses = precision, losses
        self.n_train = store.n_train
        self.graphs = device.type == "cuda"
        if isinstance(net, FunctionalNet):
            net.to(device)
        elif device.type == "cuda" and isinstance(net, LayerNet) and net.image is not None:
            from fedcohort.simulate.engine.fused import usable  # loads a compiler

            products_of = "tf32x3" if precision == "single" else "tf32"
            if usable(torch.cuda.current_device() if device.index is None else device.index, products_of):
                net.fuse(products_of)
        # From here on all arrays are on the device: a training step never waits for the host.
        store = store.to(device)
        self.x, self.sample, self.label, self.targets = store.x, store.sample, store.label, store.targets
        self.crops = crop_table(store.shape).to(device) if local.augment else None
        if net.features is not None:
            features = net.features.to(device)
            self.x = self.x.index_select(1, features)
            if self.crops is not None:  # permute the features, and the zero after them, into the net's order
                places = torch.nn.functional.pad(features.argsort(), (0, 1), value=len(features))
                self.crops = places[self.crops.index_select(1, features)]
        self.order = net.order.to(device)
        is_param = net.order < net.n_params  # the others are padding
        inverse = torch.empty(net.n_params, dtype=torch.int64)
        inverse[net.order[is_param]] = torch.arange(len(net.order))[is_param]
        self.inverse = inverse.to(device)
        self.straight = len(net.order) == net.n_params and bool((net.order == torch.arange(net.n_params)).all())
        # Compared with the labels, it gives their one-hot vectors.
        self._class = torch.arange(classes, device=device)
        self._tables: dict[tuple[int, tuple[int, ...], bool, float], _StepBuffers] = {}
        self._most = 2**62  # jobs in a stack, and elements of activations in evaluation, that fit into memory
        self._memory = _MEMORY

    def close(self) -> None:
        """Release the graphs and the data on the device."""
        self._tables.clear()
        self.x = self.x[:0]

    def _to_net_order(self, flat: torch.Tensor) -> torch.Tensor:
        """Rearrange flat vectors (M, P) in the net's order (M, Q)."""
        if self.straight:
            return flat
        return torch.nn.functional.pad(flat, (0, 1)).index_select(1, self.order)

    def _to_flat(self, vectors: torch.Tensor) -> torch.Tensor:
        """Rearrange vectors in the net's order (M, Q) as flat ones (M, P)."""
        return vectors.clone() if self.straight else vectors.index_select(1, self.inverse)

    # -- training ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def train(
        self, table: JobTable, models: torch.Tensor, prox: float, correction: torch.Tensor | None
    ) -> torch.Tensor:
        """Train all jobs; return their vectors (J, P), which the device may still be computing."""
        stacks = _stacks(table.steps, _FLAT if self.device.type == "cuda" else 1)
        if not self.net.pads and len(table):  # clients with equally many samples have equal batches
            stacks = [jobs[table.n[jobs] == n] for jobs in stacks for n in np.unique(table.n[jobs])]
        stacks = [part for jobs in stacks for part in np.array_split(jobs, -(-len(jobs) // self._most) or 1)]
        try:
            if len(stacks) == 1:
                return self._train(table, models, prox, correction)
            trained = [
                self._train(table[jobs], models, prox, None if correction is None else correction[self._send(jobs)])
                for jobs in stacks
            ]
        except torch.OutOfMemoryError:
            # What fits depends on the module's activations, the graphs and the device's other users, so it is found.
            largest = max(map(len, stacks))
            if largest <= 1:
                raise
            self._most = -(-largest // 2)
            log.warning("%d models at once do not fit into memory: now at most %d", largest, self._most)
            trained = []
        if not trained:  # here, because the error holds on to what did not fit
            self._free()
            return self.train(table, models, prox, correction)
        return torch.cat(trained).index_select(0, self._send(np.argsort(np.concatenate(stacks))))

    def _free(self) -> None:
        self._tables.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _train(
        self, table: JobTable, models: torch.Tensor, prox: float, correction: torch.Tensor | None
    ) -> torch.Tensor:
        """Train all jobs as one stack, in which every job takes as long as the longest."""
        count = len(table)
        start = self._to_net_order(models.index_select(0, self._send(table.run)))
        steps = int(table.steps.max(initial=0))
        if steps == 0:
            return self._to_flat(start)
        width = min(self.local.batch_size, int(table.n.max()))
        # A graph of all steps would need memory for each of them; a graph of one step would be launched once per step.
        # So the steps are cut into equal chunks, rounded up so that runs with nearly as many steps share a graph.
        chunks = -(-steps // _UNROLLED)
        unrolled = _round_up(-(-steps // chunks), 5)
        widths = (width,) * unrolled
        if not self.net.pads:  # the sizes of the batches are part of the graph
            chunks, unrolled = 1, steps
            widths = tuple(plan_counts(int(table.n[0]), width, steps).tolist())
        jobs = _round_up(count, _grain(count))
        batches = _Batches(table, self.local, chunks * unrolled, jobs, width, self.net.draws)
        pulled = prox != 0.0 or correction is not None
        with products(self.precision, self.device):
            # From one call to the next only contents change, never addresses, or a graph could not be replayed.
            t = self._prepare(jobs, widths, pulled, prox)
            pseudo = self._pseudo_labels(table, models) if t.pseudo is not None else None
            t.vectors[:count] = start
            if t.velocity is not None:
                t.velocity.zero_()
            if t.pull is not None:
                t.pull.zero_()
                if prox:
                    t.pull[:count].add_(start[:, : self.net.trainable], alpha=prox)
                if correction is not None:
                    t.pull[:count].sub_(self._to_net_order(correction)[:, : self.net.trainable])
            for chunk in range(chunks):
                self._upload(t, batches, chunk * unrolled, pseudo)
                if self.graphs and t.graph is None:
                    self._capture(t, prox)
                if t.graph is not None:
                    t.graph.replay()
                else:
                    self._unroll(t, prox)
            return self._to_flat(t.vectors[:count])

    def _send(self, array: IntArray | FloatArray | np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> torch.Tensor:
        """Copy an array to the device without waiting for it."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def _prepare(self, jobs: int, widths: tuple[int, ...], pulled: bool, prox: float) -> _StepBuffers:
        key = (jobs, widths, pulled, prox)
        if key not in self._tables:
            if len(self._tables) >= _GRAPHS:  # each occupies memory on the device as long as it is kept
                self._tables.pop(next(iter(self._tables)))
            size, device = self.net.trainable, self.device
            shape = (len(widths), jobs, max(widths))

            def new_weights() -> torch.Tensor:
                return torch.zeros(jobs, size, device=device)

            robust = self.local.loss == "robust"
            vectors = torch.zeros(jobs, len(self.net.order), device=device)
            self._tables[key] = _StepBuffers(
                vectors=vectors,
                weights=vectors[:, :size],
                gradient=new_weights(),
                velocity=new_weights() if self.local.momentum else None,
                pull=new_weights() if pulled else None,
                slots=torch.zeros(shape, dtype=torch.int64, device=device),
                pseudo=torch.zeros(shape, dtype=torch.int64, device=device) if robust else None,
                crops=torch.zeros(shape, dtype=torch.int64, device=device) if self.local.augment else None,
                keys=torch.zeros(shape[:2], dtype=torch.int64, device=device) if self.net.draws else None,
                numbers=torch.zeros(*shape[:2], shape[2] + 1, device=device),
                widths=widths,
            )
        return self._tables[key]

    def _upload(
        self, t: _StepBuffers, batches: _Batches, start: int, pseudo: tuple[torch.Tensor, IntArray] | None
    ) -> None:
        """Copy the batches of the next U steps to where the graph reads them."""
        stop = start + len(t.slots)
        t.slots.copy_(self._send(batches.slots[start:stop]))
        t.numbers.copy_(self._send(batches.numbers[start:stop]))
        if t.crops is not None and batches.crops is not None:
            t.crops.copy_(self._send(batches.crops[start:stop]))
        if t.keys is not None and batches.keys is not None:
            t.keys.copy_(self._send(batches.keys[start:stop]))
        if t.pseudo is not None and pseudo is not None:
            labels, begins = pseudo
            places = t.slots[:, : len(begins)] + self._send(begins - batches.first)[None, :, None]
            # If a job has no such step, its places are meaningless and only have to be valid.
            t.pseudo[:, : len(begins)] = labels[places.clamp_(0, len(labels) - 1)]

    def _pseudo_labels(self, table: JobTable, models: torch.Tensor) -> tuple[torch.Tensor, IntArray]:
        """Return the pseudo-labels of all jobs' clients, one after another, and where those of each job begin."""
        start = np.cumsum(table.n) - table.n
        labels = torch.zeros(max(int(table.n.sum()), 1), dtype=torch.int64, device=self.device)
        for jobs, logits, _ in self._score(models, Spans(table.run, table.first, table.n)):
            labels[self._count_up(start[jobs], table.n[jobs])] = logits.argmax(1)
        return labels, start

    def _unroll(self, t: _StepBuffers, prox: float) -> None:
        """Do the U steps in the buffers for all jobs; a job that is done has rate 0."""
        # The pull of FedProx to the global model is weight decay, and a constant that _train has put into "pull".
        decay = self.local.weight_decay + prox
        jobs = t.slots.shape[1]
        position, label = self.sample[t.slots], self.label[t.slots]
        weights, rates = t.numbers[:, :, :-1], t.numbers[:, :, -1]
        present = (weights != 0).float()
        # The share of the weights that decay leaves.
        keep = 1 - rates * decay if decay and t.velocity is None else None
        target = None
        if self.losses is None and self.local.loss != "robust":
            # Minus the weighted one-hot labels (U, J, B, C), for plain cross-entropy.
            target = (label.unsqueeze(3) == self._class) * -weights.unsqueeze(3)
        for step, wide in enumerate(t.widths):
            x = self.x.index_select(0, position[step, :, :wide].reshape(-1))
            if t.crops is not None and self.crops is not None:
                x = crop(x, self.crops, t.crops[step, :, :wide].reshape(-1))
            x = x.view(jobs, wide, -1)
            saved: Saved = []
            key = None if t.keys is None else t.keys[step]
            logits = self.net.logits(t.vectors, x, saved, present[step, :, :wide], key)
            weight = weights[step, :, :wide].unsqueeze(2)
            if target is not None:
                delta = torch.addcmul(target[step, :, :wide], torch.softmax(logits, 2), weight)
            elif self.losses is None:
                pseudo = None if t.pseudo is None else t.pseudo[step, :, :wide]
                delta = logit_derivative(logits, label[step, :, :wide], pseudo, self.local).mul_(weight)
            else:
                aim = self._aim(t.slots[step, :, :wide])
                delta = self._derivative(logits, aim) * weight.view(jobs, wide, *(1,) * (logits.ndim - 2))
            self.net.backward(t.vectors, saved, delta, t.gradient)
            rate = rates[step].unsqueeze(1)
            if t.velocity is not None:  # as torch.optim.SGD: it accumulates gradients, and the rate is applied last
                t.velocity.mul_(self.local.momentum).sub_(t.gradient)
                if decay:
                    t.velocity.add_(t.weights, alpha=decay)
                if t.pull is not None:
                    t.velocity.sub_(t.pull)
                t.weights.addcmul_(t.velocity, rate, value=-1)
                continue
            # The derivative already includes the rate, so the whole SGD step is one pass over the weights.
            if keep is None:
                t.weights.add_(t.gradient)
            else:
                torch.addcmul(t.gradient, t.weights, keep[step].unsqueeze(1), out=t.weights)
            if t.pull is not None:
                t.weights.addcmul_(t.pull, rate)

    def _losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of each sample (M, n), given outputs (M, n, ...) and targets."""
        if self.losses is None:
            return cross_entropy(outputs, targets)
        return self.losses(outputs.flatten(0, 1), targets.flatten(0, 1)).view(outputs.shape[:2])

    def _derivative(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            outputs = outputs.detach().requires_grad_()
            (delta,) = torch.autograd.grad(self._losses(outputs, targets).sum(), outputs)
        return delta

    def _capture(self, t: _StepBuffers, prox: float) -> None:
        """Warm up on a side stream, then capture the steps, and restore the state.

        A module that cannot be captured, because it looks at a number on its way, is computed without a graph.
        """
        initial = t.vectors.clone()
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self._unroll(t, prox)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._unroll(t, prox)
            t.graph = graph
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.graphs = False
            log.warning("the model cannot be captured as a CUDA graph, so its steps are launched one by one: %s", error)
        t.vectors.copy_(initial)
        if t.velocity is not None:
            t.velocity.zero_()

    # -- evaluation ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def outputs(self, models: torch.Tensor, rows: torch.Tensor | slice) -> torch.Tensor:
        """Return the outputs (M, V, ...) of flat models (M, P) on rows of the data, in chunks that fit into memory."""
        # Rearranged once: the order of a stack costs a pass over all weights.
        vectors = self._to_net_order(models)
        x = self.x[rows.to(self.device) if isinstance(rows, torch.Tensor) else rows]
        step = max(1, self._memory // (max(8 * x.shape[1], 1024) * len(models)))
        try:
            with products(self.precision, self.device):
                # At least one part, which may be empty: it has the shape of the outputs.
                starts = range(0, max(len(x), 1), step)
                return torch.cat([self.net.logits(vectors, x[None, start : start + step]) for start in starts], 1)
        except torch.OutOfMemoryError:
            if step == 1:
                raise
            self._memory //= 4
        self._free()
        return self.outputs(models, rows)

    @torch.no_grad()
    def answers(self, models: torch.Tensor, first: int, y: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the loss (M,) of all models on samples from row ``first`` on, and the predicted classes (M, n)."""
        logits = self.outputs(models, slice(first, first + len(y)))
        yield self._losses(logits, y.expand(len(models), -1)).mean(1, dtype=torch.float64), logits.argmax(2)

    @torch.no_grad()
    def cross_entropies(
        self, models: torch.Tensor, spans: Spans, pseudo: bool, teachers: torch.Tensor | None
    ) -> Iterator[tuple[IntArray, torch.Tensor, torch.Tensor | None]]:
        """Yield the indices of spans (q,), and their samples' cross-entropies with labels and pseudo-labels."""
        guided = None if teachers is None or not pseudo else self._score(teachers, spans)
        for chosen, logits, slots in self._score(models, spans):
            by_pseudo = None
            if pseudo:
                guide = logits if guided is None else next(guided)[1]
                by_pseudo = self._losses(logits[None], guide.argmax(1)[None])[0]
            yield chosen, self._losses(logits[None], self._aim(slots)[None])[0], by_pseudo

    def _aim(self, slots: torch.Tensor) -> torch.Tensor:
        return self.label[slots] if self.targets is None else self.targets[self.sample[slots]]

    def _score(self, models: torch.Tensor, spans: Spans) -> Iterator[tuple[IntArray, torch.Tensor, torch.Tensor]]:
        """Yield for a few spans at a time: their indices (q,), logits (n, C) and slots (n,), span after span.

        The samples of all spans of one model form one row of a table, and each row is padded to the longest. Rows of
        similar length share a table, so that little of it is padding.
        """
        per_sample = max(8 * self.x.shape[1], 1024)  # roughly the number of elements of its activations
        filled = np.flatnonzero(spans.count)
        # Sorted by model, so that each model's samples are neighbours.
        filled = filled[np.argsort(spans.run[filled], kind="stable")]
        run, count = spans.run[filled], spans.count[filled]
        before = np.cumsum(count) - count
        # A new row begins with each model, and also where one model's samples would need too much memory in one row.
        piece = (before - before[np.searchsorted(run, run)]) // max(1, self._memory // per_sample)
        begins = np.flatnonzero((np.diff(run, prepend=-1) != 0) | (np.diff(piece, prepend=0) != 0))
        rows, lengths = np.split(filled, begins[1:]), np.add.reduceat(count, begins) if len(begins) else count
        order = np.argsort(lengths, kind="stable")
        start = 0
        while start < len(order):
            # The memory of a table depends on its longest row, which is its last.
            cost = np.arange(1, len(order) - start + 1) * lengths[order[start:]] * per_sample
            chosen = order[start : start + max(1, int(np.searchsorted(cost, self._memory, side="right")))]
            start += len(chosen)
            members = np.concatenate([rows[row] for row in chosen])
            table = slots = self._count_up(spans.first[members], spans.count[members])
            shortest, longest = int(lengths[chosen[0]]), int(lengths[chosen[-1]])
            if shortest < longest:
                inside = self._count_up(np.arange(len(chosen)) * longest, lengths[chosen])
                table = slots.new_zeros(len(chosen) * longest)
                table[inside] = slots
            x = self.x.index_select(0, self.sample[table]).view(len(chosen), longest, -1)
            model = self._send(spans.run[[rows[row][0] for row in chosen]])
            vectors = self._to_net_order(models.index_select(0, model))
            with products(self.precision, self.device):
                logits = self.net.logits(vectors, x).flatten(0, 1)
            yield members, logits if shortest == longest else logits[inside], slots

    def _count_up(self, first: IntArray, count: IntArray) -> torch.Tensor:
        """Return ``first[i]``, ``first[i] + 1`` and so on, ``count[i]`` numbers for each i, computed on the device."""
        total = int(count.sum())
        shift = self._send(np.stack([first - np.cumsum(count) + count, count]))
        return torch.arange(total, device=self.device) + shift[0].repeat_interleave(shift[1], output_size=total)

    @torch.no_grad()
    def gradients(self, models: torch.Tensor, spans: Spans) -> torch.Tensor:
        """Return the full-batch gradients (Q, P)."""
        count = len(spans)
        total = torch.zeros(count, len(self.order), device=self.device)
        if not count:
            return self._to_flat(total)
        vectors = self._to_net_order(models.index_select(0, self._send(spans.run)))
        part = torch.zeros_like(total)
        n, largest = spans.count, int(spans.count.max())
        step = max(1, min(largest, self._memory // (max(16 * self.x.shape[1], 1024) * count)))
        for start in range(0, largest, step):
            offsets = np.arange(start, min(start + step, largest))
            inside = offsets[None] < n[:, None]
            slots = self._send(spans.first[:, None] + np.where(inside, offsets[None], 0))
            slots.clamp_(max=len(self.sample) - 1)
            weight = self._send((inside / np.maximum(n, 1)[:, None]).astype(np.float32))
            x = self.x.index_select(0, self.sample[slots].view(-1)).view(count, len(offsets), -1)
            saved: Saved = []
            with products(self.precision, self.device):
                logits = self.net.logits(vectors, x, saved)
                # The derivative of the loss itself, whatever is minimised in training.
                delta = (
                    logit_derivative(logits, self.label[slots], None, self.local)
                    if self.losses is None
                    else self._derivative(logits, self._aim(slots))
                )
                weight = weight.view(*weight.shape, *(1,) * (logits.ndim - 2))
                self.net.backward(vectors, saved, delta.mul_(weight), part)
            # Sums of parts: the samples of all clients at once would not fit into memory.
            total.add_(part)
        return self._to_flat(total)


class StackedTraining(ModuleBackend):
    """Trains with a stack and evaluates with the plain loop.

    For modules of which a sample's output depends on the other samples even in evaluation, such as batch normalisation
    without running statistics: tables of padded or combined samples would change it.
    """

    def __init__(self, program: DeviceProgram, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.program = program

    def train(
        self, table: JobTable, models: torch.Tensor, prox: float, correction: torch.Tensor | None
    ) -> torch.Tensor:
        """Train all jobs; return their vectors (J, P)."""
        return self.program.train(table, models, prox, correction)

    def close(self) -> None:
        """Release the graphs, and restore torch's number of threads."""
        self.program.close()
        super().close()


class _Batches:
    """The batches of a call as arrays (S, J, ...), with rate 0 if a job has no such step."""

    def __init__(self, table: JobTable, local: LocalTraining, steps: int, jobs: int, width: int, draws: bool) -> None:
        self.first = table.first
        self.slots = np.zeros((steps, jobs, width), dtype=np.int64)
        start = np.arange(len(table)) * width
        table.draw(local, self.slots.reshape(-1), base=table.first, start=start, stride=jobs * width, row=width)
        self.numbers = np.zeros((steps, jobs, width + 1), dtype=np.float32)
        self.crops = np.zeros_like(self.slots) if local.augment else None
        self.keys = np.zeros((steps, jobs), dtype=np.int64) if draws else None
        if self.keys is not None:
            step = np.arange(steps)[:, None]
            self.keys[:, : len(table)] = stream_keys(table.seed, table.round, table.client, step)
        columns = (table.n, table.steps, table.round, table.per_epoch)
        same_numbers: dict[tuple[int, ...], list[int]] = {}  # jobs by the values that determine their numbers
        for job, key in enumerate(zip(*(values.tolist() for values in columns), strict=True)):
            same_numbers.setdefault(key, []).append(job)
        for (n, done, round_, per_epoch), members in same_numbers.items():
            if not done:
                continue
            wide = min(width, n)
            rates, counts = local.lr_schedule(round_, done, per_epoch), plan_counts(n, wide, done)
            numbers = np.zeros((done, width + 1), dtype=np.float32)
            numbers[:, :wide] = ((1.0 if local.momentum else rates) / -counts)[:, None]
            batches = -(-n // wide)  # in an epoch; the last one may be short
            numbers[batches - 1 :: batches, counts.min() : wide] = 0
            numbers[:, -1] = rates
            self.numbers[:done, members] = numbers[:, None]
            if self.crops is not None:
                for job in members:
                    self.crops[:done, job, :wide] = table.crops(job, local)


def _stacks(steps: IntArray, flat: int) -> list[IntArray]:
    """Group the jobs to train together: jobs of similar length, if there are enough of the shorter ones.

    The time of a step is proportional to the number of jobs in the stack, but never less than that of ``flat`` jobs.

    >>> [stack.tolist() for stack in _stacks(np.array([20, 200, 20, 20, 190, 30]), flat=2)]
    [[1, 4], [5, 0, 2, 3]]
    >>> [stack.tolist() for stack in _stacks(np.array([20, 200, 20]), flat=32)]
    [[0, 1, 2]]
    """
    order = np.argsort(-steps, kind="stable")
    ranked = steps[order]
    cuts: list[int] = []
    start = at = 0
    while at < len(ranked) and ranked[at]:
        at = int(np.searchsorted(-ranked, -ranked[at] / 2))  # the first job with at most half as many steps
        if at == len(ranked):
            break
        together = max(len(ranked) - start, flat) * ranked[start]
        apart = max(at - start, flat) * ranked[start] + max(len(ranked) - at, flat) * ranked[at]
        if apart < together:
            cuts.append(at)
            start = at
    return np.split(order, cuts) if cuts else [np.arange(len(steps))]


def _grain(jobs: int) -> int:
    """Return the multiple to which a number of jobs is rounded up; beyond 64 jobs, this adds at most a sixteenth.

    Runs whose clients fail or come and go have a different number of jobs in every round. Each shape has its own graph,
    with weights and activations in the memory of a device that several processes may share.

    >>> [_grain(jobs) for jobs in (10, 63, 64, 127, 128, 1150)]
    [4, 4, 4, 4, 8, 64]
    """
    return 1 << max(2, jobs.bit_length() - 5)


def _round_up(count: int, grain: int) -> int:
    """Round up numbers beyond 16, so that calls of nearly the same shape share one graph."""
    return count if count <= 16 else -(-count // grain) * grain
