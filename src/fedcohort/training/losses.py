"""Compute losses, their derivatives with respect to the logits (..., C), and their means per client."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from fedcohort.core.signals import LossMeasure
from fedcohort.training.local import LocalTraining


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of each sample (...), given logits (..., C) and labels (...)."""
    flat = F.cross_entropy(logits.flatten(0, -2), labels.reshape(-1), reduction="none")
    return flat.view(labels.shape)


def robust_from_cross_entropies(by_label: torch.Tensor, by_pseudo: torch.Tensor, local: LocalTraining) -> torch.Tensor:
    """Return FLASH's robust loss of each sample, given its cross-entropies with its label and its pseudo-label."""
    reversed_from = by_label if local.robust_reverse == "labels" else by_pseudo
    # The reverse cross-entropy of a one-hot label is -log 0 times the probability of all other classes.
    reverse = -local.robust_log_zero * (1 - torch.exp(-reversed_from))
    return by_label + local.robust_alpha * by_pseudo + local.robust_beta * reverse


def logit_derivative(
    logits: torch.Tensor, labels: torch.Tensor, pseudo: torch.Tensor | None, local: LocalTraining
) -> torch.Tensor:
    """Return the derivative (..., C) of each sample's loss.

    With p the softmax, z the pseudo-label and A = log 0: p - e_y, or
    (1 + alpha) p - e_y - alpha e_z + beta A p_r (e_r - p), where r is y or z (``robust_reverse``).
    """
    delta = torch.softmax(logits, -1)
    labels = labels.unsqueeze(-1)
    minus_one = torch.full(labels.shape, -1.0, dtype=logits.dtype, device=logits.device)
    if pseudo is None:
        return delta.scatter_add_(-1, labels, minus_one)
    pseudo = pseudo.unsqueeze(-1)
    reverse = labels if local.robust_reverse == "labels" else pseudo
    # The derivative of -beta A (1 - p_r) by the logits, with that of p_r being p_r (e_r - p).
    strength = local.robust_beta * local.robust_log_zero * delta.gather(-1, reverse)
    delta = delta * (1 + local.robust_alpha - strength)
    delta.scatter_add_(-1, reverse, strength)
    delta.scatter_add_(-1, labels, minus_one)
    return delta.scatter_add_(-1, pseudo, local.robust_alpha * minus_one)


def reduce_losses(
    by_label: torch.Tensor,
    by_pseudo: torch.Tensor | None,
    lengths: torch.Tensor,
    measures: Sequence[LossMeasure],
    local: LocalTraining | None,
) -> torch.Tensor:
    """Return the measures (len(measures), q) of q clients.

    Parameters
    ----------
    by_label, by_pseudo : torch.Tensor
        Cross-entropies (n,) of the samples with labels and pseudo-labels, client after client. The second may be None
        if no measure needs it.
    lengths : torch.Tensor
        (q,) number of samples of each client, at least one.
    local : LocalTraining or None
        The weights of the robust loss; None if no measure needs them.
    """
    by_label = by_label.double()  # single precision loses digits in sums over many samples
    columns = []
    for measure in measures:
        values = by_label
        if measure.loss != "label":
            assert by_pseudo is not None
            values = by_pseudo.double()
            if measure.loss == "robust":
                assert local is not None
                values = robust_from_cross_entropies(by_label, values, local)
        square = measure.mean == "root-mean-square"
        # Sum segment by segment, so the result does not depend on the other clients and is reproducible on a GPU.
        mean = (
            torch.segment_reduce(values.square() if square else values, "sum", lengths=lengths, unsafe=True) / lengths
        )
        columns.append(mean.sqrt() if square else mean)
    return torch.stack(columns)
