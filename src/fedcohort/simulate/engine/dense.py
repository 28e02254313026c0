"""Fully connected networks as batched matrix products with a hand-written backward pass.

A weight's gradient and its decayed SGD step are one ``baddbmm_``, and every buffer is reused. The product of the first
layer, which is nearly all of the work, is done job by job with exactly the rows of that job's batch. The small layers
above it are batched over the jobs of a group, where samples a shorter batch does not have carry weight zero; they are
stored transposed, (units, batch), so that softmax and its relatives run along a contiguous batch.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch

from fedcohort.arrays import FloatArray, IntArray
from fedcohort.simulate.engine.flat import FlatModel
from fedcohort.simulate.engine.groups import TrainTask
from fedcohort.simulate.engine.layers import Dense, Layer, Relu
from fedcohort.simulate.engine.losses import sample_losses
from fedcohort.simulate.engine.program import CHUNK, Program
from fedcohort.simulate.engine.store import Store
from fedcohort.simulate.local import BatchPlan, LocalTraining

_threshold_backward = torch.ops.aten.threshold_backward.grad_input
_Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
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

    rows: torch.Tensor  # (g, w, units) of the first layer, pre-activations, then activations
    row_delta: torch.Tensor  # (g, w, units) their derivatives
    hidden: list[torch.Tensor]  # (g, units, w) of every layer; the first is the transpose of ``rows``
    hidden_t: list[torch.Tensor]  # the same, (g, w, units)
    delta: list[torch.Tensor]  # (g, units, w) derivatives of the loss
    upper: torch.Tensor  # (g, units of all layers but the first, w), what ``delta`` is made of
    sums: list[torch.Tensor]  # (g, units, 1) of ``delta`` over the batch
    upper_sums: torch.Tensor  # (g, units of all layers but the first)
    logits: torch.Tensor  # (g, C, w), contiguous
    probability: torch.Tensor  # (g, C, w)
    last: torch.Tensor  # (g, C, w), contiguous: the derivative by the logits
    products: dict[tuple[int, ...], list[_Operands]]  # batch sizes -> operands of the first layer
    call: int = -1  # the call that has cleared the buffers

    @staticmethod
    def of(units: list[int], g: int, w: int) -> _Views:
        """Allocate."""
        rows, row_delta = torch.zeros(g, w, units[0]), torch.zeros(g, w, units[0])
        hidden = [rows.transpose(1, 2), *(torch.zeros(g, count, w) for count in units[1:])]
        upper, upper_sums = torch.zeros(g, sum(units[1:]), w), torch.zeros(g, sum(units[1:]))
        delta = [row_delta.transpose(1, 2), *torch.split(upper, units[1:], 1)]
        sums = [torch.zeros(g, units[0]), *torch.split(upper_sums, units[1:], 1)]
        single = len(units) == 1
        return _Views(
            rows=rows,
            row_delta=row_delta,
            hidden=hidden,
            hidden_t=[h.transpose(1, 2) for h in hidden],
            delta=delta,
            upper=upper,
            sums=[part.unsqueeze(2) for part in sums],
            upper_sums=upper_sums,
            logits=torch.zeros(g, units[-1], w) if single else hidden[-1],
            probability=torch.zeros(g, units[-1], w),
            last=torch.zeros(g, units[-1], w) if single else delta[-1],
            products={},
        )


class _Weights:
    """Flat vectors of g jobs, seen layer by layer, and for each number of jobs still active."""

    def __init__(self, sides: list[int], g: int) -> None:
        pairs = list(itertools.pairwise(sides))
        self.size = sum(a * b + b for a, b in pairs)
        self.buffer = torch.zeros(g, -(-self.size // 16) * 16)
        self.flat = self.buffer[:, : self.size]
        self.active: list[_ActiveWeights] = []
        for active in range(g + 1):
            weight, bias, offset = [], [], 0
            for inputs, outputs in pairs:
                end = offset + inputs * outputs
                weight.append(self.buffer[:active, offset:end].view(active, outputs, inputs))
                bias.append(self.buffer[:active, end : end + outputs].unsqueeze(2))
                offset = end + outputs
            self.active.append(
                _ActiveWeights(
                    self.buffer[:active],
                    weight,
                    [w.transpose(1, 2) for w in weight],
                    bias,
                    bias[0].transpose(1, 2),
                    [(b[:, 0], w.t(), w) for b, w in zip(bias[0].unbind(0), weight[0].unbind(0), strict=True)],
                )
            )


@dataclass
class _ActiveWeights:
    flat: torch.Tensor  # (active, padded P)
    weight: list[torch.Tensor]  # (active, outputs, inputs)
    weight_t: list[torch.Tensor]  # (active, inputs, outputs)
    bias: list[torch.Tensor]  # (active, outputs, 1)
    bias_row: torch.Tensor  # (active, 1, outputs) of the first layer
    first: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]  # (active) the first layer's bias, weight', weight


class DenseProgram(Program):
    """A ReLU network of dense layers, several clients at once."""

    def __init__(self, flat: FlatModel, sample: tuple[int, ...], local: LocalTraining, sides: list[int]) -> None:
        super().__init__(flat, sample, local)
        self.sides = sides
        self.batched = sides[0] * sides[1] * local.batch_size < _BATCHED_BELOW
        self.group_size = 16 if self.batched else 5
        self._weights: dict[tuple[str, int], _Weights] = {}
        self._views: dict[tuple[int, int], _Views] = {}
        self._rows = torch.empty(0, sides[0])  # the gathered samples of one step
        self._calls = 0

    # -- buffers -------------------------------------------------------------------------------------------------

    def _vectors(self, purpose: str, g: int) -> _Weights:
        key = (purpose, g)
        if key not in self._weights:
            self._weights[key] = _Weights(self.sides, g)
        return self._weights[key]

    def _buffers(self, g: int, w: int) -> _Views:
        key = (g, w)
        if key not in self._views:
            if len(self._views) > 256:
                self._views.clear()
            self._views[key] = _Views.of(self.sides[1:], g, w)
        views = self._views[key]
        if views.call != self._calls:
            # Rows beyond a short batch keep what was there; it must be finite, and never another job's NaN.
            views.rows.zero_()
            views.call = self._calls
        return views

    def _gather(self, store: Store, positions: torch.Tensor) -> torch.Tensor:
        count = positions.shape[0]
        if self._rows.shape[0] < count:
            self._rows = torch.empty(count, self.sides[0])
            for views in self._views.values():
                views.products.clear()
        return torch.index_select(store.x, 0, positions, out=self._rows[:count])

    def _products(self, views: _Views, counts: tuple[int, ...]) -> list[_Operands]:
        """Return, for each job, its samples and its rows of the first layer's buffers."""
        if counts not in views.products:
            if len(views.products) > 64:
                views.products.clear()
            operands: list[_Operands] = []
            start = 0
            for job, count in enumerate(counts):
                x = self._rows[start : start + count]
                operands.append((x, views.rows[job, :count], views.row_delta[job, :count].t()))
                start += count
            views.products[counts] = operands
        return views.products[counts]

    # -- training ------------------------------------------------------------------------------------------------

    def train(self, task: TrainTask, store: Store) -> None:
        """Train the group in lock-step; a job that has done its steps drops out of the batch."""
        table, jobs = task.table, task.jobs
        g = len(jobs)
        self._calls += 1
        weights = self._vectors("weights", g)
        for row, job in enumerate(jobs):
            weights.flat[row] = task.models[table.run[job]]
        steps = table.steps[jobs]
        if steps[0]:
            pull = self._pull(task, weights)
            speed = None
            if self.local.momentum:
                speed = self._vectors("momentum", g)
                speed.buffer.zero_()
            rates = table.rates(int(jobs[0]), self.local)
            pseudo = self._pseudo_labels(task, store) if self.local.loss == "robust" else None
            batches = _Batches(
                table.first[jobs],
                [table.plan(int(job), self.local) for job in jobs],
                np.ones_like(rates) if self.local.momentum else rates,
                store,
                pseudo,
            )
            group = _Group(weights, speed, pull, batches, task.prox, store)
            for step, rate in enumerate(rates.tolist()):
                logits = self._step(group, step, rate)
                if step == 0:
                    losses = batches.loss(logits, float(rates[0]) if not self.local.momentum else 1.0, self.local)
                    task.first_loss[jobs[: len(losses)]] = losses.tolist()
        for row, job in enumerate(jobs):
            task.out[job] = weights.flat[row]

    def _pull(self, task: TrainTask, weights: _Weights) -> _Weights | None:
        """Return the part of the gradient that stays the same for the whole round, prox * w_global - correction."""
        if not task.prox and task.correction is None:
            return None
        pull = self._vectors("pull", len(task.jobs))
        torch.mul(weights.buffer, task.prox, out=pull.buffer)
        if task.correction is not None:
            for row, job in enumerate(task.jobs):
                pull.flat[row] -= task.correction[job]
        return pull

    def _pseudo_labels(self, task: TrainTask, store: Store) -> list[torch.Tensor]:
        labels = []
        for job in task.jobs:
            first, n = int(task.table.first[job]), int(task.table.n[job])
            x = store.x[store.sample[first : first + n]]
            labels.append(self.scores(task.models[task.table.run[job]], x).argmax(0))
        return labels

    def _step(self, group: _Group, step: int, rate: float) -> torch.Tensor:
        """Do one SGD step of the jobs that have one; return their logits (active, C, w)."""
        batches, speed = group.batches, group.speed
        counts = batches.counts[step]
        active, w = len(counts), batches.widest
        whole = active == batches.jobs
        views = self._buffers(active, w)
        hidden, delta = views.hidden, views.delta
        top = len(hidden) - 1
        mine = group.weights.active[active]

        # Forward.
        samples = self._gather(store=group.store, positions=batches.positions(step, self.batched))
        if self.batched:
            x = samples.view(active, w, -1)
            torch.baddbmm(mine.bias_row, x, mine.weight_t[0], out=views.rows)
        else:
            products = self._products(views, counts)
            for (bias, weight_t, _), (x, out, _) in zip(mine.first, products, strict=True):
                torch.addmm(bias, x, weight_t, out=out)
        if top:
            views.rows.relu_()
        else:
            views.logits.copy_(hidden[0])
        for layer in range(1, top + 1):
            torch.baddbmm(mine.bias[layer], mine.weight[layer], hidden[layer - 1], out=hidden[layer])
            if layer < top:
                hidden[layer].relu_()

        # Derivative by the logits; without momentum its weights hold the learning rate, and the products below step.
        torch.softmax(views.logits, 1, out=views.probability)
        scale = batches.scales[step] if whole else batches.scales[step][:active]
        if batches.pseudo is None:
            target = batches.target(step, self.sides[-1])
            torch.mul(views.probability, scale, out=views.last)
            views.last.sub_(target if whole else target[:active])
        else:
            torch.mul(batches.robust_delta(views.probability, step, self.local), scale, out=views.last)

        # Backward, each layer's weights moved as soon as nothing below needs them.
        decay = self.local.weight_decay + group.prox
        if speed is None:
            moved, keep, sign = mine, 1.0 - rate * decay, -1.0
        else:
            moved, keep, sign = speed.active[active], self.local.momentum, 1.0
        if not top:
            delta[0].copy_(views.last)
        for layer in range(top, 0, -1):
            if layer > 1:
                torch.bmm(mine.weight_t[layer], delta[layer], out=delta[layer - 1])
                below, above = delta[layer - 1], hidden[layer - 1]
            else:
                torch.bmm(delta[1].transpose(1, 2), mine.weight[1], out=views.row_delta)
                below, above = views.row_delta, views.rows
            moved.weight[layer].baddbmm_(delta[layer], views.hidden_t[layer - 1], beta=keep, alpha=sign)
            _threshold_backward(below, above, 0, grad_input=below)
        if self.batched:
            moved.weight[0].baddbmm_(delta[0], samples.view(active, w, -1), beta=keep, alpha=sign)
        else:
            for (_, _, weight), (x, _, by_rows) in zip(moved.first, products, strict=True):
                weight.addmm_(by_rows, x, beta=keep, alpha=sign)
        torch.sum(views.row_delta, 1, out=views.sums[0].squeeze(2))
        if top:
            torch.sum(views.upper, 2, out=views.upper_sums)
        for bias, total in zip(moved.bias, views.sums, strict=True):
            if keep != 1.0:
                bias.mul_(keep)
            bias.add_(total, alpha=sign)
        if speed is not None:
            if decay:
                moved.flat.add_(mine.flat, alpha=decay)
            if group.pull is not None:
                moved.flat.sub_(group.pull.active[active].flat)
            mine.flat.add_(moved.flat, alpha=-rate)
        elif group.pull is not None:
            mine.flat.add_(group.pull.active[active].flat, alpha=rate)
        return views.logits

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
    """The batches of a group: rows of the data, labels and weights of every step. Jobs are in order of their steps."""

    def __init__(
        self,
        first: IntArray,
        plans: list[BatchPlan],
        factor: FloatArray,
        store: Store,
        pseudo: list[torch.Tensor] | None,
    ) -> None:
        longest, widest = plans[0].indices.shape[0], max(plan.indices.shape[-1] for plan in plans)
        slots = np.zeros((longest, len(plans), widest), dtype=np.int64)
        count = np.zeros((longest, len(plans)), dtype=np.int64)
        for row, (start, plan) in enumerate(zip(first, plans, strict=True)):
            done, width = plan.indices.shape
            mine = slots[:done, row]
            mine[:, :width] = plan.indices
            mine += start
            count[:done, row] = plan.counts
        inside = np.arange(widest) < count[:, :, None]
        self.jobs, self.widest = len(plans), widest
        self.counts = [tuple(c for c in row if c) for row in count.tolist()]  # (steps) of the active jobs
        self._ends = np.cumsum([0, *map(sum, self.counts)]).tolist()
        every = torch.from_numpy(slots)
        self.position = store.sample[every]  # (steps, g, widest); beyond a batch, some sample of the same client
        self._exact = store.sample[torch.from_numpy(slots[inside])]  # those of all batches, one after the other
        self.label = store.label[every]
        self.pseudo: torch.Tensor | None = None
        if pseudo is not None:
            local = torch.from_numpy(slots - np.where(count > 0, first, 0)[:, :, None])
            self.pseudo = torch.stack([labels[local[:, row]] for row, labels in enumerate(pseudo)], 1)
        scale = inside * (factor[:, None] / np.maximum(count, 1))[:, :, None]
        self.scale = torch.from_numpy(scale.astype(np.float32)).unsqueeze(2)  # (steps, g, 1, widest)
        self.scales = self.scale.unbind(0)
        self._from, self._until = 0, 0  # the steps whose targets are ready
        self._targets: tuple[torch.Tensor, ...] = ()

    def positions(self, step: int, padded: bool) -> torch.Tensor:
        """Return the rows a step gathers: equally many of each job when ``padded``, else exactly the batches."""
        if padded:
            return self.position[step, : len(self.counts[step])].reshape(-1)
        return self._exact[self._ends[step] : self._ends[step + 1]]

    def target(self, step: int, classes: int) -> torch.Tensor:
        """Return the weighted one-hot labels (g, C, widest)."""
        if not self._from <= step < self._until:
            steps, g, widest = self.label.shape
            self._from = step
            self._until = min(steps, step + max(1, _TARGET_ELEMENTS // (g * widest * classes)))
            part = slice(self._from, self._until)
            targets = torch.zeros(self._until - self._from, g, classes, widest)
            self._targets = targets.scatter_(2, self.label[part].unsqueeze(2), self.scale[part]).unbind(0)
        return self._targets[step - self._from]

    def robust_delta(self, p: torch.Tensor, step: int, local: LocalTraining) -> torch.Tensor:
        """Return the derivative of FLASH's loss of each sample by the logits, (active, C, w), from the softmax p.

        With q the probability of the label y and A = log 0:
        (1 + alpha) p - e_y - alpha e_z + beta A q (e_y - p).
        """
        assert self.pseudo is not None
        active, _, w = p.shape
        labels = self.label[step, :active, None, :w]
        strength = local.robust_beta * local.robust_log_zero * p.gather(1, labels)
        delta = p * (1 + local.robust_alpha - strength)
        delta.scatter_add_(1, labels, strength - 1)
        pseudo = self.pseudo[step, :active, None, :w]
        return delta.scatter_add_(1, pseudo, torch.full_like(strength, -local.robust_alpha))

    def loss(self, logits: torch.Tensor, factor: float, local: LocalTraining) -> torch.Tensor:
        """Return each job's mean loss of the first step, (active,), given its transposed logits (active, C, w)."""
        active, _, w = logits.shape
        pseudo = None if self.pseudo is None else self.pseudo[0, :active, :w]
        losses = sample_losses(logits.transpose(1, 2), self.label[0, :active, :w], pseudo, local)
        return (losses * self.scale[0, :active, 0, :w]).sum(1) / factor


@dataclass(frozen=True)
class _Group:
    """What the steps of one group share."""

    weights: _Weights
    speed: _Weights | None
    pull: _Weights | None
    batches: _Batches
    prox: float
    store: Store
