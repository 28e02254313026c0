"""Train locally in the obvious way: one model, one loop, ``torch.optim.SGD``.

The other backends are tested against this definition. It also trains models that cannot be batched, and runs on the
clients of a live federation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from fedcohort.core.arrays import IntArray
from fedcohort.core.errors import InputError
from fedcohort.simulate.engine.crops import crop, crop_table
from fedcohort.simulate.own_code import own_code
from fedcohort.training.local import BatchPlan, LocalTraining
from fedcohort.training.losses import cross_entropy, robust_from_cross_entropies

_CHUNK = 512  # samples predicted at once


def robust_loss(logits: torch.Tensor, labels: torch.Tensor, pseudo: torch.Tensor, local: LocalTraining) -> torch.Tensor:
    """Return FLASH's loss of each sample, shape (n,), from logits (n, C), labels (n,) and pseudo-labels (n,)."""
    return robust_from_cross_entropies(cross_entropy(logits, labels), cross_entropy(logits, pseudo), local)


def pseudo_labels(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the classes ``model`` predicts for ``x`` (n, ...), shape (n,)."""
    training = model.training
    model.eval()
    with torch.no_grad():
        batches = [x[start : start + _CHUNK] for start in range(0, len(x), _CHUNK)]
        with own_code():
            parts = [model(batch).argmax(1) for batch in batches]
    model.train(training)
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=x.device)


def train_plain(
    model: nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
    plan: BatchPlan,
    local: LocalTraining,
    *,
    round: int = 0,
    batches_per_epoch: int | None = None,
    prox: float = 0.0,
    correction: torch.Tensor | None = None,
    crops: IntArray | None = None,
    losses: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """Train ``model`` in place for one round on one client's samples.

    Parameters
    ----------
    model : torch.nn.Module
        The global model; afterwards the client's.
    x, y : torch.Tensor
        The client's training samples (n, ...) and labels (n,).
    plan : BatchPlan
        From :func:`fedcohort.training.local.batch_plan`.
    local : LocalTraining
        Optimiser and loss.
    round : int
        For the learning rate.
    batches_per_epoch : int, optional
        For a learning rate that decays per local epoch; default is that of this client.
    prox : float
        Adds ``prox * (w - w_global)`` to the gradient (FedProx).
    correction : torch.Tensor, optional
        Flat vector (number of parameters,) added to the gradient (SCAFFOLD, FedDyn).
    losses : function, optional
        Loss of each sample (n,), from outputs and targets; default: what ``local`` says.
    crops : array of int, optional
        From :func:`fedcohort.training.local.crop_plan`; needed if ``local.augment``.
    """
    _check(x, y, local, crops)
    parameters = list(model.parameters())
    start = [p.detach().clone() for p in parameters] if prox else []
    corrections = [] if correction is None else _split_like(correction, parameters)
    pseudo = pseudo_labels(model, x) if local.loss == "robust" else None
    rates = local.lr_schedule(round, len(plan.counts), batches_per_epoch or local.batches_per_epoch(len(x)))
    table = crop_table(tuple(x.shape[1:])).to(x.device) if crops is not None else None
    optimizer = torch.optim.SGD(parameters, lr=local.lr, momentum=local.momentum, weight_decay=local.weight_decay)
    model.train()
    for step, (row, count) in enumerate(zip(plan.indices, plan.counts, strict=True)):
        batch = torch.as_tensor(row[:count], device=x.device)
        images = x[batch]
        if table is not None and crops is not None:
            which = torch.as_tensor(crops[step, :count], device=x.device)
            images = crop(images.flatten(1), table, which).view_as(images)
        targets = y[batch]
        optimizer.zero_grad()
        with own_code():
            logits = model(images)
        if losses is not None:
            loss = losses(logits, targets).mean()
        elif pseudo is None:
            loss = F.cross_entropy(logits, targets)
        else:
            loss = robust_loss(logits, targets, pseudo[batch], local).mean()
        with own_code():
            loss.backward()  # type: ignore[no-untyped-call]
        # Without prox or a correction, the list is empty, and the gradient keeps exactly the bits of the loss's.
        for p, origin in zip(parameters, start, strict=False):
            p.grad.add_(p.detach() - origin, alpha=prox)  # type: ignore[union-attr]  # backward has filled it
        for p, shift in zip(parameters, corrections, strict=False):
            p.grad.add_(shift)  # type: ignore[union-attr]
        optimizer.param_groups[0]["lr"] = float(rates[step])
        optimizer.step()


def _check(x: torch.Tensor, y: torch.Tensor, local: LocalTraining, crops: IntArray | None) -> None:
    if local.augment != (crops is not None):
        raise InputError(f"Crops go with 'augment', which is {local.augment} here. Got {crops!r}.")
    if len(x) != len(y):
        raise InputError(f"A client has {len(x)} samples but {len(y)} labels.")


def _split_like(vector: torch.Tensor, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    """Cut a flat vector into the shapes of the parameters; the rest belongs to buffers."""
    sizes = [p.numel() for p in parameters]
    parts = torch.split(vector[: sum(sizes)], sizes)
    return [part.view_as(p) for part, p in zip(parts, parameters, strict=True)]
