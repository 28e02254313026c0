"""Train locally in the obvious way: one model, one loop, plain SGD.

The other backends are tested against this definition. It also trains models that cannot be batched, and runs on the
clients of a live federation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from fedcohort.core.arrays import IntArray
from fedcohort.simulate.engine.crops import crop, crop_table
from fedcohort.simulate.engine.flat import FlatModel
from fedcohort.simulate.engine.layer_rules import LayerRules
from fedcohort.simulate.engine.precision import autocast
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
    model: nn.Module | FlatModel,
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
    keys: IntArray | None = None,
    rows: torch.Tensor | None = None,
    precision: str = "tf32",
) -> None:
    """Train ``model`` in place for one round on one client's samples, with the steps of ``torch.optim.SGD``.

    Parameters
    ----------
    model : torch.nn.Module or FlatModel
        The global model; afterwards the client's.
    x, y : torch.Tensor
        The client's training samples (n, ...) and labels (n,).
    rows : (n,) int tensor, optional
        Where the client's samples are, if ``x`` has those of others, too.
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
    keys : array of int, optional
        (steps,) from :func:`~fedcohort.simulate.engine.layer_rules.stream_keys`, for dropout and other random layers;
        default: torch's generator.
    precision : str
        See :func:`~fedcohort.simulate.engine.precision.autocast`.
    """
    flat = model if isinstance(model, FlatModel) else FlatModel(model)
    module, parameters = flat.module, flat.parameters
    start = [p.detach().clone() for p in parameters] if prox else None
    shift = None if correction is None else flat.split(correction)
    # A client that takes part again starts without momentum: the server averages models, not optimisers.
    velocity = [torch.zeros_like(p) for p in parameters] if local.momentum else None
    # By the model that was received: FLASH fixes pseudo-labels for the whole round.
    pseudo = pseudo_labels(module, x if rows is None else x[rows]) if local.loss == "robust" else None
    rates = local.lr_schedule(round, len(plan.counts), batches_per_epoch or local.batches_per_epoch(len(y)))
    table = crop_table(tuple(x.shape[1:])).to(x.device) if crops is not None else None
    module.train()
    for step, (row, count) in enumerate(zip(plan.indices, plan.counts, strict=True)):
        batch = torch.as_tensor(row[:count], device=x.device)
        images = x[batch if rows is None else rows[batch]]
        if table is not None and crops is not None:
            which = torch.as_tensor(crops[step, :count], device=x.device)
            images = crop(images.flatten(1), table, which).view_as(images)
        targets = y[batch]
        rules = contextlib.nullcontext() if keys is None else LayerRules(torch.tensor(int(keys[step]), device=x.device))
        with torch.enable_grad():
            with own_code(), autocast(precision, x.device), rules:
                logits = module(images)
            logits = logits.to(parameters[0].dtype)
            if losses is not None:
                loss = losses(logits, targets).mean()
            elif pseudo is None:
                loss = F.cross_entropy(logits, targets)
            else:
                loss = robust_loss(logits, targets, pseudo[batch], local).mean()
            # None and not zero, so that a parameter without a part in this loss is known below.
            for parameter in parameters:
                parameter.grad = None
            with own_code():
                loss.backward()  # type: ignore[no-untyped-call]
        # As torch.optim.SGD does it, bit for bit, without its checks. A parameter that took no part is left alone.
        used = [place for place, parameter in enumerate(parameters) if parameter.grad is not None]
        gradients = [gradient for parameter in parameters if (gradient := parameter.grad) is not None]
        weights = [parameters[place].data for place in used]
        if start is not None:
            moved = torch._foreach_sub(weights, [start[place] for place in used])
            torch._foreach_add_(gradients, moved, alpha=prox)
        if shift is not None:
            torch._foreach_add_(gradients, [shift[place] for place in used])
        if local.weight_decay:
            torch._foreach_add_(gradients, weights, alpha=local.weight_decay)
        if velocity is not None:
            momenta = [velocity[place] for place in used]
            torch._foreach_mul_(momenta, local.momentum)
            torch._foreach_add_(momenta, gradients)
            gradients = momenta
        torch._foreach_add_(weights, gradients, alpha=-float(rates[step]))
