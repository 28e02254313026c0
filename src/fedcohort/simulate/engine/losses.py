"""The losses of local training and their derivatives by the logits, for logits (..., C)."""

from __future__ import annotations

import torch

from fedcohort.simulate.local import LocalTraining


def sample_losses(
    logits: torch.Tensor, labels: torch.Tensor, pseudo: torch.Tensor | None, local: LocalTraining
) -> torch.Tensor:
    """Return the loss of each sample (...): cross-entropy, or FLASH's robust loss when pseudo-labels are given."""
    normaliser = logits.logsumexp(-1)
    by_label = normaliser - logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    if pseudo is None:
        return by_label
    by_pseudo = normaliser - logits.gather(-1, pseudo.unsqueeze(-1)).squeeze(-1)
    return robust_of(by_label, by_pseudo, local)


def robust_of(by_label: torch.Tensor, by_pseudo: torch.Tensor, local: LocalTraining) -> torch.Tensor:
    """Return FLASH's robust loss of each sample, given its cross-entropies with its label and its pseudo-label."""
    reverse = -local.robust_log_zero * (1 - torch.exp(-by_label))
    return by_label + local.robust_alpha * by_pseudo + local.robust_beta * reverse


def logit_derivative(
    logits: torch.Tensor, labels: torch.Tensor, pseudo: torch.Tensor | None, local: LocalTraining
) -> torch.Tensor:
    """Return the derivative (..., C) of each sample's loss.

    With p the softmax, q the probability of the label y, z the pseudo-label and A = log 0: p - e_y, or
    (1 + alpha) p - e_y - alpha e_z + beta A q (e_y - p).
    """
    delta = torch.softmax(logits, -1)
    labels = labels.unsqueeze(-1)
    minus_one = torch.full(labels.shape, -1.0, dtype=logits.dtype, device=logits.device)
    if pseudo is None:
        return delta.scatter_add_(-1, labels, minus_one)
    strength = local.robust_beta * local.robust_log_zero * delta.gather(-1, labels)
    delta = delta * (1 + local.robust_alpha - strength)
    delta.scatter_add_(-1, labels, strength - 1)
    return delta.scatter_add_(-1, pseudo.unsqueeze(-1), local.robust_alpha * minus_one)
