"""What a client does in a round: how many SGD steps, on which batches, with which learning rate and loss.

All randomness of local training is in :func:`batch_plan` and, with augmentation, :func:`crop_plan`. They draw with
NumPy from streams of (seed, round, client), so a client of a live federation can repeat the simulated one batch for
batch in a plain loop.

.. [Chang2023] X. Chang et al., "FLASH: Federated Learning Across Simultaneous Heterogeneities", Section 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedcohort.core import rng
from fedcohort.core.arrays import FloatArray, IntArray
from fedcohort.core.errors import ParameterError
from fedcohort.core.params import Boolean, Interval, OneOf, Optional, Parameterized, Sequence, param


@dataclass(frozen=True, kw_only=True)
class LocalTraining(Parameterized):
    r"""Local SGD of one client in one round.

    Exactly one of ``steps``, ``epochs`` and ``epochs_of_largest`` says how long it lasts.

    The learning rate of a step is

    .. math:: \eta \cdot decay^{round} \cdot factor^{|\{m \in milestones: m \le round\}|} \cdot
              decay_{epoch}^{round \cdot E + e}

    where e is the local epoch within the round (FedACS decays per local epoch). The robust loss ([Chang2023]_) of a
    sample with label y, pseudo-label z (argmax of the global model at the start of the round) and prediction p is
    CE(p, y) + alpha CE(p, z) - beta A (1 - p_y). The last term is the reverse cross-entropy with log 0 = A for the
    given label, as the paper writes it for one sample. Its set notation names both label sets, so ``robust_reverse``
    may also be "pseudo-labels", with p_z for p_y.

    With ``augment``, every image of every batch is shifted by -4 to 4 pixels in each direction and mirrored left to
    right or not, all equally likely. The new pixels are zeros, the mean colour, because images of bytes are
    standardised. Losses and pseudo-labels are computed on the original images.

    Examples
    --------
    >>> LocalTraining(steps=20, batch_size=64, lr=0.005, milestones=(150, 300)).lr_at(200)
    0.0025
    >>> LocalTraining(epochs=5, batch_size=50, lr=0.1).steps_for(120)
    15
    """

    batch_size: int = param(64, Interval(int, 1, 10**9), "samples of one SGD step (B)")
    steps: int | None = param(None, Optional(Interval(int, 1, 10**9)), "SGD iterations of a round")
    epochs: int | None = param(None, Optional(Interval(int, 1, 10**9)), "passes over the client's samples (E)")
    epochs_of_largest: int | None = param(
        None, Optional(Interval(int, 1, 10**9)), "as many steps as the largest client needs for this many epochs"
    )
    lr: float = param(0.01, Interval(float, 0, None, "neither"), "learning rate of the first round (eta)")
    lr_decay: float = param(1.0, Interval(float, 0, 1, "right"), "factor of the learning rate per round")
    lr_decay_epoch: float = param(1.0, Interval(float, 0, 1, "right"), "factor of the learning rate per local epoch")
    milestones: tuple[int, ...] = param((), Sequence(Interval(int, 0, None)), "rounds at which it drops")
    milestone_factor: float = param(0.5, Interval(float, 0, 1, "right"), "factor of the learning rate at a milestone")
    momentum: float = param(0.0, Interval(float, 0, 1, "left"), "momentum of SGD, fresh in every round")
    weight_decay: float = param(0.0, Interval(float, 0, None), "L2 penalty added to the gradient")
    loss: str = param("cross-entropy", OneOf(("cross-entropy", "robust")), "what is minimised")
    robust_alpha: float = param(
        1.0, Interval(float, 0, None), "weight of the pseudo-labels (alpha); 0.25 where a network is slow to learn"
    )
    robust_beta: float = param(1.0, Interval(float, 0, None), "weight of the reverse cross-entropy (beta)")
    robust_log_zero: float = param(-4.0, Interval(float, None, 0, "left"), "what stands for log 0 (A)")
    robust_reverse: str = param(
        "labels", OneOf(("labels", "pseudo-labels")), "what the reverse cross-entropy compares with"
    )
    augment: bool = param(False, Boolean(), "crop images at random after padding them by 4 pixels, mirror half of them")

    def __post_init__(self) -> None:
        """Check each value, and that exactly one of the lengths is given."""
        super().__post_init__()
        given = [name for name in ("steps", "epochs", "epochs_of_largest") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ParameterError(
                "LocalTraining must be given exactly one of 'steps', 'epochs' and 'epochs_of_largest'. "
                f"Got {' and '.join(given) or 'none'}."
            )
        if self.lr_decay_epoch != 1.0 and self.steps is not None:
            raise ParameterError(
                "The 'lr_decay_epoch' parameter of LocalTraining counts local epochs, but its length is in 'steps'.",
                hint="give 'epochs' or 'epochs_of_largest' instead of 'steps', or use 'lr_decay'",
            )

    def batches_per_epoch(self, n: int) -> int:
        """Return the number of batches in one pass over ``n`` samples; the last batch may be short."""
        return -(-n // self.batch_size)

    def steps_for(self, n: int, largest: int | None = None) -> int:
        """Return how many steps a client with ``n`` samples makes; ``largest`` is the size of the largest client.

        A client without samples makes none.
        """
        if n == 0:
            return 0
        if self.steps is not None:
            return self.steps
        if self.epochs is not None:
            return self.epochs * self.batches_per_epoch(n)
        if largest is None:
            raise ParameterError("With 'epochs_of_largest' the size of the largest client is needed. Got None.")
        # The same for all clients, so that the size of a client does not decide how far its model moves.
        return (self.epochs_of_largest or 0) * self.batches_per_epoch(largest)

    def lr_at(self, round: int, step: int = 0, batches_per_epoch: int = 1) -> float:
        """Return the learning rate of a step.

        Only ``lr_decay_epoch`` needs ``batches_per_epoch``: the client's own, or the largest client's with
        ``epochs_of_largest``.
        """
        passed = sum(1 for milestone in self.milestones if milestone <= round)
        rate = self.lr * self.lr_decay**round * self.milestone_factor**passed
        if self.lr_decay_epoch != 1.0:
            epochs = self.epochs or self.epochs_of_largest or 1
            # Epochs of earlier rounds count as if every round had as many, whoever took part in them.
            rate *= self.lr_decay_epoch ** (round * epochs + step // max(batches_per_epoch, 1))
        return float(rate)

    def lr_schedule(self, round: int, steps: int, batches_per_epoch: int = 1) -> FloatArray:
        """Return the learning rates of all ``steps`` of a round, shape (steps,)."""
        if self.lr_decay_epoch == 1.0:
            return np.full(steps, self.lr_at(round))
        return np.array([self.lr_at(round, step, batches_per_epoch) for step in range(steps)], dtype=np.float64)


class BatchPlan(NamedTuple):
    """Which samples a client uses in each step of a round."""

    indices: IntArray  # (steps, width) positions among the client's n training samples; width = min(batch size, n)
    counts: IntArray  # (steps,) how many of a row are meant; the rest of a short row repeats positions of the epoch


def batch_plan(seed: int, round: int, client: int, n: int, local: LocalTraining, steps: int | None = None) -> BatchPlan:
    """Draw the batches of one client in one round.

    An epoch is one shuffled pass over the n samples in ceil(n / B) batches, of which the last may be short. Steps
    continue through consecutive epochs, each with a new shuffle. All shuffles are drawn in turn from
    ``rng.stream(seed, rng.TRAINING, round, client)``. This is the whole definition, so a plain loop can repeat it::

        generator = rng.stream(seed, rng.TRAINING, round, client)
        while True:
            order = generator.permutation(n)
            for start in range(0, n, batch_size):
                step(order[start : start + batch_size])     # until `steps` steps are done

    Parameters
    ----------
    seed, round, client : int
        Position in the random stream.
    n : int
        The client's number of training samples.
    local : LocalTraining
        Batch size and length.
    steps : int, optional
        Number of steps; default: as in ``local``. Needed with ``epochs_of_largest``.

    Returns
    -------
    BatchPlan
        ``indices`` (steps, min(B, n)) and ``counts`` (steps,). Only the first ``counts`` entries of a row are in the
        batch.

    Examples
    --------
    >>> plan = batch_plan(0, 3, 7, 5, LocalTraining(epochs=1, batch_size=2))
    >>> plan.counts
    array([2, 2, 1])
    >>> sorted(int(i) for row, count in zip(*plan) for i in row[:count])
    [0, 1, 2, 3, 4]
    """
    if steps is None:
        steps = local.steps_for(n)
    if n == 0 or steps == 0:
        return BatchPlan(np.zeros((0, 0), dtype=np.int64), np.zeros(0, dtype=np.int64))
    # A stream of its own per client, so that its batches do not depend on who else is in the cohort.
    generator = rng.stream(seed, rng.TRAINING, round, client)
    width = min(local.batch_size, n)
    per_epoch = -(-n // width)
    epochs = -(-steps // per_epoch)
    # Short rows are filled with positions of the same epoch, which `counts` leaves out: arrays need rows of one length.
    rest = per_epoch * width - n
    orders = []
    for _ in range(epochs):
        order = generator.permutation(n)
        orders.append(order)
        if rest:
            orders.append(order[:rest])
    indices = (orders[0] if len(orders) == 1 else np.concatenate(orders)).reshape(-1, width)[:steps]
    return BatchPlan(indices, plan_counts(n, width, steps))


def plan_counts(n: int, width: int, steps: int) -> IntArray:
    """Return the batch sizes (steps,) of passes over ``n`` samples; the last batch of a pass may be short."""
    per_epoch = -(-n // width)
    counts = np.full(steps, width, dtype=np.int64)
    counts[per_epoch - 1 :: per_epoch] = n - (per_epoch - 1) * width
    return counts


# The usual augmentation of CIFAR: a shift of up to an eighth of the image, and its mirror image.
PADDING = 4  # pixels around an image before it is cropped
CROPS = 2 * (2 * PADDING + 1) ** 2  # ways to crop and mirror an image


def crop_plan(seed: int, round: int, client: int, shape: tuple[int, ...]) -> IntArray:
    """Draw how the images of one client's batches are cropped and mirrored, one number for each entry of the plan.

    ``shape`` is the shape of the plan's indices.

    The image gets a margin of :data:`PADDING` zeros. Number ``81 * mirrored + 9 * down + right`` is the part of it that
    begins at row ``down`` and column ``right``, then mirrored left to right or not. All numbers are drawn from
    ``rng.stream(seed, rng.AUGMENTATION, round, client)``, in the order of the plan.

    Examples
    --------
    >>> plan = batch_plan(0, 3, 7, 5, LocalTraining(epochs=1, batch_size=2))
    >>> crop_plan(0, 3, 7, plan.indices.shape).shape
    (3, 2)
    """
    return rng.stream(seed, rng.AUGMENTATION, round, client).integers(CROPS, size=shape)
