"""Fully connected networks as batched matrix products with a hand-written backward pass.

Activations are stored transposed, (units, batch), so that softmax and its relatives run along a contiguous batch; a
weight's gradient and its decayed SGD step are one ``baddbmm_``; every buffer is reused. The product of the first layer,
which is nearly all of the work, is done job by job with exactly the rows of that job's batch; the small layers above it
are batched over the jobs of a group, where the columns a shorter batch does not have carry weight zero.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch

from fedcohort.arrays import IntArray
from fedcohort.simulate.engine.flat import FlatModel
from fedcohort.simulate.engine.groups import TrainTask
from fedcohort.simulate.engine.layers import Dense, Layer, Relu
from fedcohort.simulate.engine.program import CHUNK, Program
from fedcohort.simulate.engine.store import Store
from fedcohort.simulate.local import BatchPlan, LocalTraining

_threshold_backward = torch.ops.aten.threshold_backward.grad_input
_BATCHED_BELOW = 2**18  # multiply-adds of a first-layer product under which one batched call beats one call per job
_TARGET_ELEMENTS = 2**18  # one-hot targets prepared at a time


def dense_sides(layers: list[Layer]) -> list[int] | None:
    """Return the widths [inputs, hidden..., classes] if the layers are dense ones with ReLU in between, else None."""
    sides: list[int] = []
    for position, layer in enumerate(layers):
        if position % 2 == 0:
            if not isinstance(layer, Dense):
                return None
            outputs, inputs = layer.weight.shape
            sides += [outputs] if sides else [inputs, outputs]
        elif not isinstance(layer, Relu):
            return None
    return sides


@dataclass
class _Views:
    """Buffers of one group size and batch width, seen layer by layer."""

    hidden: list[torch.Tensor]  # (g, units, w) pre-activations, then activations
    hidden_t: list[torch.Tensor]  # the same, (g, w, units)
    delta: list[torch.Tensor]  # (g, units, w) derivatives of the loss, all in one tensor
    delta_all: torch.Tensor  # (g, all units, w)
    probability: torch.Tensor  # (g, C, w)
    hidden_0: dict[tuple[int, int], torch.Tensor]  # (job, columns) -> part of hidden[0]
    delta_0: dict[tuple[int, int], torch.Tensor]


class _Weights:
    """Flat vectors of g jobs in the program's own order (all weights, then all biases), seen layer by layer."""

    def __init__(self, sides: list[int], g: int) -> None:
        pairs = list(itertools.pairwise(sides))
        self.units = sum(sides[1:])
        self.n_weights = sum(a * b for a, b in pairs)
        size = self.n_weights + self.units
        self.flat = torch.zeros(g, -(-size // 16) * 16)
        self.weight: list[torch.Tensor] = []
        self.bias: list[torch.Tensor] = []
        offset, row = 0, 0
        self.biases = self.flat[:, self.n_weights : size]
        for inputs, outputs in pairs:
            self.weight.append(self.flat[:, offset : offset + inputs * outputs].view(g, outputs, inputs))
            self.bias.append(self.biases[:, row : row + outputs].unsqueeze(2))
            offset += inputs * outputs
            row += outputs
        self.weight_t = [w.transpose(1, 2) for w in self.weight]
        self.weight_0 = list(self.weight[0].unbind(0))
        self.bias_0 = list(self.bias[0].unbind(0))

    def parts(self, vector: torch.Tensor, row: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pair the pieces of ``vector`` (P,), in the module's order, with those of ``row``."""
        result, offset = [], 0
        for weight, bias in zip(self.weight, self.bias, strict=True):
            for mine in (weight[row], bias[row, :, 0]):
                result.append((vector[offset : offset + mine.numel()].view(mine.shape), mine))
                offset += mine.numel()
        return result


class DenseProgram(Program):
    """A ReLU network of dense layers, several clients at once."""

    def __init__(self, flat: FlatModel, sample: tuple[int, ...], local: LocalTraining, sides: list[int]) -> None:
        super().__init__(flat, sample, local)
        self.sides = sides
        width = local.batch_size
        self.batched = sides[0] * sides[1] * width < _BATCHED_BELOW
        self.group_size = 16 if self.batched else 5
        self._weights: dict[tuple[str, int], _Weights] = {}
        self._views: dict[tuple[int, int], _Views] = {}
        self._rows = torch.empty(0, sides[0])  # the gathered samples of one step
        self._row_views: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    # -- buffers -------------------------------------------------------------------------------------------------

    def _vectors(self, purpose: str, g: int) -> _Weights:
        key = (purpose, g)
        if key not in self._weights:
            self._weights[key] = _Weights(self.sides, g)
        return self._weights[key]

    def _buffers(self, g: int, w: int) -> _Views:
        key = (g, w)
        if key not in self._views:
            if len(self._views) > 64:
                self._views.clear()
            units = self.sides[1:]
            hidden = [torch.zeros(g, count, w) for count in units]
            delta_all = torch.zeros(g, sum(units), w)
            self._views[key] = _Views(
                hidden,
                [h.transpose(1, 2) for h in hidden],
                list(torch.split(delta_all, units, 1)),
                delta_all,
                torch.zeros(g, units[-1], w),
                {},
                {},
            )
        return self._views[key]

    def _sample_rows(self, count: int) -> torch.Tensor:
        if len(self._rows) < count:
            self._rows = torch.empty(count, self.sides[0])
            self._row_views.clear()
        return self._rows[:count]

    def _rows_of(self, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        key = (start, count)
        if key not in self._row_views:
            if len(self._row_views) > 4096:
                self._row_views.clear()
            rows = self._rows[start : start + count]
            self._row_views[key] = (rows, rows.t())
        return self._row_views[key]

    # -- training ------------------------------------------------------------------------------------------------

    def train(self, task: TrainTask, store: Store) -> None:
        """Train the group in lock-step; a job that has done its steps drops out of the batch."""
        table, jobs = task.table, task.jobs
        g = len(jobs)
        weights = self._vectors("weights", g)
        for row, job in enumerate(jobs):
            for source, mine in weights.parts(task.models[table.run[job]], row):
                mine.copy_(source)
        pull = self._pull(task, weights)
        speed = None
        if self.local.momentum:
            speed = self._vectors("momentum", g)
            speed.flat.zero_()
        steps = table.steps[jobs]
        if steps[0]:
            plans = [table.plan(int(job), self.local) for job in jobs]
            pseudo = self._pseudo_labels(task, store) if self.local.loss == "robust" else None
            batches = _Batches(table.first[jobs], plans, store, pseudo)
            rates = table.rates(int(jobs[0]), self.local)
            for step in range(int(steps[0])):
                active = g if steps[-1] > step else int((steps > step).sum())
                first = task.first_loss if step == 0 else None
                self._step(
                    weights, speed, pull, batches, step, active, float(rates[step]), task.prox, store, first, jobs
                )
        for row, job in enumerate(jobs):
            for result, mine in weights.parts(task.out[job], row):
                result.copy_(mine)

    def _pull(self, task: TrainTask, weights: _Weights) -> torch.Tensor | None:
        """Return the part of the gradient that stays the same for the whole round, prox * w_global - correction."""
        if not task.prox and task.correction is None:
            return None
        constant = self._vectors("pull", len(task.jobs))
        constant.flat.zero_()
        if task.prox:
            constant.flat.add_(weights.flat, alpha=task.prox)
        if task.correction is not None:
            for row, job in enumerate(task.jobs):
                for source, mine in constant.parts(task.correction[job], row):
                    mine.sub_(source)
        return constant.flat

    def _pseudo_labels(self, task: TrainTask, store: Store) -> list[torch.Tensor]:
        labels = []
        for job in task.jobs:
            first, n = int(task.table.first[job]), int(task.table.n[job])
            x = store.x[store.sample[first : first + n]]
            labels.append(self.scores(task.models[task.table.run[job]], x).argmax(0))
        return labels

    def _step(
        self,
        weights: _Weights,
        speed: _Weights | None,
        pull: torch.Tensor | None,
        batches: _Batches,
        step: int,
        active: int,
        rate: float,
        prox: float,
        store: Store,
        first_loss: np.ndarray | None,
        jobs: IntArray,
    ) -> None:
        counts = batches.counts[step][:active]
        w = max(counts)
        views = self._buffers(active, w)
        hidden, delta = views.hidden, views.delta
        last = len(hidden) - 1
        whole = active == len(jobs)
        weight = weights.weight if whole else [m[:active] for m in weights.weight]
        bias = weights.bias if whole else [b[:active] for b in weights.bias]

        # Forward.
        positions, padded = batches.positions(step, active, w, self.batched)
        rows = self._sample_rows(len(positions))
        torch.index_select(store.x, 0, positions, out=rows)
        if self.batched:
            x = rows.view(active, w, -1)
            torch.baddbmm(bias[0], weight[0], x.transpose(1, 2), out=hidden[0])
        else:
            start = 0
            for job, count in enumerate(counts):
                torch.addmm(
                    weights.bias_0[job],
                    weights.weight_0[job],
                    self._rows_of(start, count)[1],
                    out=self._part(views.hidden_0, hidden[0], job, count),
                )
                start += count
        for layer in range(last):
            hidden[layer].relu_()
            torch.baddbmm(bias[layer + 1], weight[layer + 1], hidden[layer], out=hidden[layer + 1])
        torch.softmax(hidden[last], 1, out=views.probability)

        # Derivative by the logits, times the step's factor: the rate itself where the step is part of the product.
        factor = 1.0 if speed is not None else rate
        scale, target = batches.targets(step, active, w, self.sides[-1], padded)
        if first_loss is not None:
            first_loss[jobs[:active]] = batches.loss(hidden[last], step, active, w, self.local).tolist()
        if batches.pseudo is None:
            torch.mul(views.probability, scale * factor, out=delta[last])
            delta[last].sub_(target, alpha=factor)
        else:
            delta[last].copy_(batches.robust_delta(views.probability, target, step, active, w, self.local))
            delta[last].mul_(scale * factor)

        # Backward, each layer's weights updated as soon as nothing below needs them.
        if speed is None:
            moved, keep, sign = weights, 1.0 - rate * (self.local.weight_decay + prox), -1.0
        else:
            moved, keep, sign = speed, self.local.momentum, 1.0
        moved_weight = moved.weight if whole else [m[:active] for m in moved.weight]
        weight_t = weights.weight_t if whole else [m[:active] for m in weights.weight_t]
        for layer in range(last, 0, -1):
            below = delta[layer - 1]
            torch.bmm(weight_t[layer], delta[layer], out=below)
            moved_weight[layer].baddbmm_(delta[layer], views.hidden_t[layer - 1], beta=keep, alpha=sign)
            _threshold_backward(below, hidden[layer - 1], 0, grad_input=below)
        if self.batched:
            moved_weight[0].baddbmm_(delta[0], rows.view(active, w, -1), beta=keep, alpha=sign)
        else:
            start = 0
            for job, count in enumerate(counts):
                moved.weight_0[job].addmm_(
                    self._part(views.delta_0, delta[0], job, count),
                    self._rows_of(start, count)[0],
                    beta=keep,
                    alpha=sign,
                )
                start += count
        moved.biases[:active].mul_(keep).add_(views.delta_all.sum(2), alpha=sign)
        if speed is not None:
            velocity, flat = speed.flat[:active], weights.flat[:active]
            if self.local.weight_decay or prox:
                velocity.add_(flat, alpha=self.local.weight_decay + prox)
            if pull is not None:
                velocity.sub_(pull[:active])
            flat.add_(velocity, alpha=-rate)
        elif pull is not None:
            weights.flat[:active].add_(pull[:active], alpha=rate)

    @staticmethod
    def _part(cache: dict[tuple[int, int], torch.Tensor], buffer: torch.Tensor, job: int, count: int) -> torch.Tensor:
        """Return the first ``count`` columns of one job; the columns beyond hold zeros, never another job's numbers."""
        key = (job, count)
        if key not in cache:
            cache[key] = buffer[job, :, :count]
        if count < buffer.shape[2]:
            buffer[job, :, count:].zero_()
        return cache[key]

    # -- evaluation ----------------------------------------------------------------------------------------------

    def _layers(self, vector: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        layers, offset = [], 0
        for inputs, outputs in itertools.pairwise(self.sides):
            weight = vector[offset : offset + inputs * outputs].view(outputs, inputs)
            offset += inputs * outputs
            layers.append((weight, vector[offset : offset + outputs].unsqueeze(1)))
            offset += outputs
        return layers

    def scores(self, vector: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the transposed logits (C, n)."""
        result = torch.empty(self.sides[-1], len(x))
        layers = self._layers(vector)
        for start in range(0, len(x), CHUNK):
            part = x[start : start + CHUNK].t()
            for position, (weight, bias) in enumerate(layers):
                part = torch.addmm(bias, weight, part)
                if position < len(layers) - 1:
                    part.relu_()
            result[:, start : start + CHUNK] = part
        return result

    def gradient(self, vector: torch.Tensor, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
        """Write the full-batch gradient, summed over chunks."""
        layers, grads = self._layers(vector), self._layers(out)
        out.zero_()
        for start in range(0, len(x), CHUNK):
            part = x[start : start + CHUNK]
            inputs = [part.t()]
            for position, (weight, bias) in enumerate(layers):
                above = torch.addmm(bias, weight, inputs[-1])
                inputs.append(above.relu_() if position < len(layers) - 1 else above)
            delta = torch.softmax(inputs.pop(), 0)
            delta.scatter_add_(0, y[None, start : start + CHUNK], torch.full((1, len(part)), -1.0))
            delta.div_(len(x))
            for position in range(len(layers) - 1, -1, -1):
                grads[position][0].addmm_(delta, inputs[position].t())
                grads[position][1].add_(delta.sum(1, keepdim=True))
                if position:
                    delta = torch.mm(layers[position][0].t(), delta)
                    _threshold_backward(delta, inputs[position], 0, grad_input=delta)


class _Batches:
    """The batches of a group: rows of the data, labels and weights of every step."""

    def __init__(
        self, first: IntArray, plans: list[BatchPlan], store: Store, pseudo: list[torch.Tensor] | None
    ) -> None:
        longest = max(len(plan.counts) for plan in plans)
        self.widest = max(plan.indices.shape[1] if plan.indices.size else 0 for plan in plans)
        g = len(plans)
        slots = np.zeros((longest, g, self.widest), dtype=np.int64)
        count = np.zeros((longest, g), dtype=np.int64)
        for row, (start, plan) in enumerate(zip(first, plans, strict=True)):
            done, width = plan.indices.shape
            slots[:done, row, :width] = plan.indices
            slots[:done, row] += start
            count[:done, row] = plan.counts
        every = torch.from_numpy(slots)
        self.position = store.sample[every]  # (steps, g, widest)
        self.label = store.label[every]
        self.pseudo: torch.Tensor | None = None
        if pseudo is not None:
            local = torch.from_numpy(slots - np.asarray(first)[None, :, None])
            self.pseudo = torch.stack([labels[local[:, row]] for row, labels in enumerate(pseudo)], 1)
        self.counts: list[list[int]] = count.tolist()
        self.count = count
        inside = np.arange(self.widest) < count[:, :, None]
        self.scale = torch.from_numpy((inside / np.maximum(count, 1)[:, :, None]).astype(np.float32)).unsqueeze(2)
        self._from, self._until = 0, 0  # the steps whose targets are ready
        self._target = torch.empty(0)

    def positions(self, step: int, active: int, w: int, padded: bool) -> tuple[torch.Tensor, bool]:
        """Return the rows a step gathers: w of each job when ``padded``, else as many as each job's batch has."""
        rows = self.position[step, :active, :w]
        counts = self.counts[step][:active]
        if padded or min(counts) == w:
            return rows.reshape(-1), padded
        return torch.cat([rows[job, :count] for job, count in enumerate(counts)]), padded

    def targets(self, step: int, active: int, w: int, classes: int, padded: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weight of each sample (active, 1, w) and the weighted one-hot labels (active, C, w)."""
        if not self._from <= step < self._until:
            steps, g, widest = self.label.shape
            self._from = step
            self._until = min(steps, step + max(1, _TARGET_ELEMENTS // (g * widest * classes)))
            part = slice(self._from, self._until)
            self._target = torch.zeros(self._until - self._from, g, classes, widest)
            self._target.scatter_(2, self.label[part].unsqueeze(2), self.scale[part])
        return self.scale[step, :active, :, :w], self._target[step - self._from, :active, :, :w]

    def robust_delta(
        self, p: torch.Tensor, target: torch.Tensor, step: int, active: int, w: int, local: LocalTraining
    ) -> torch.Tensor:
        """Return the derivative of FLASH's loss of each sample by the logits, (active, C, w).

        With q the probability of the label y and A = log 0:
        (1 + alpha) p - e_y - alpha e_z + beta A q (e_y - p).
        """
        assert self.pseudo is not None
        labels = self.label[step, :active, None, :w]
        strength = local.robust_beta * local.robust_log_zero * p.gather(1, labels)
        delta = p * (1 + local.robust_alpha - strength)
        delta.scatter_add_(1, labels, strength - 1)
        pseudo = self.pseudo[step, :active, None, :w]
        return delta.scatter_add_(1, pseudo, torch.full_like(strength, -local.robust_alpha))

    def loss(self, logits: torch.Tensor, step: int, active: int, w: int, local: LocalTraining) -> torch.Tensor:
        """Return each job's mean loss of a step, (active,)."""
        normaliser = logits.logsumexp(1, keepdim=True)
        by_label = normaliser - logits.gather(1, self.label[step, :active, None, :w])
        if self.pseudo is not None:
            by_pseudo = normaliser - logits.gather(1, self.pseudo[step, :active, None, :w])
            reverse = -local.robust_log_zero * (1 - torch.exp(-by_label))
            by_label = by_label + local.robust_alpha * by_pseudo + local.robust_beta * reverse
        return (by_label * self.scale[step, :active, :, :w]).sum((1, 2))
