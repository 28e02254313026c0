"""Feature shift and concept shift: some clients see the world differently, and for them their view is right.

A view changes images as another sensor would, or the meaning of labels. It applies to the samples of a group's clients
and to the test set on which the group is evaluated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import ndimage

from fedcohort.core.arrays import AnyArray, IntArray
from fedcohort.core.errors import InputError, ParameterError, ScenarioError
from fedcohort.core.params import Interval, OneOf, Parameterized, Sequence, param
from fedcohort.scenario.groups import Groups
from fedcohort.scenario.partition import nearest

PLAIN = "plain"
RELABEL = "relabel"  # the one view that changes labels and not samples


def _blur(images: AnyArray) -> AnyArray:
    """Average over a window a fifth of the image wide, like a lens out of focus."""
    width = max(3, images.shape[1] // 5)
    soft = ndimage.uniform_filter1d(images, width, axis=1, mode="nearest", output=np.float32)
    soft = ndimage.uniform_filter1d(soft, width, axis=2, mode="nearest")
    return np.asarray(np.rint(soft), np.uint8)


def _sketch(images: AnyArray) -> AnyArray:
    """Keep only outlines: how much the brightness changes from pixel to pixel."""
    wide = images.astype(np.float32)
    across = np.diff(wide, axis=2, append=wide[:, :, -1:])
    down = np.diff(wide, axis=1, append=wide[:, -1:])
    return np.minimum(np.hypot(across, down), 255).astype(np.uint8)


_IMAGES: dict[str, Callable[[AnyArray], AnyArray]] = {
    "rotate": lambda images: np.rot90(images, 1, axes=(1, 2)),
    "upside-down": lambda images: np.rot90(images, 2, axes=(1, 2)),
    "invert": lambda images: 255 - images,
    "contrast": lambda images: images // 4 + 96,  # a quarter of it, around middle grey
    "blur": _blur,
    "sketch": _sketch,
}
VIEWS = (PLAIN, *_IMAGES, RELABEL)  # names in configurations and in results; never rename one


def seen(view: str, samples: AnyArray) -> AnyArray:
    """Return samples as a view shows them.

    >>> seen("rotate", np.array([[[1, 2], [3, 4]]], np.uint8)).tolist()
    [[[2, 4], [1, 3]]]
    """
    if view in (PLAIN, RELABEL):
        return samples
    if samples.dtype != np.uint8 or samples.ndim not in (3, 4):
        raise InputError(
            f"The view {view!r} changes images of bytes, (n, H, W) or (n, H, W, channels). Got samples of shape "
            f"{samples.shape[1:]}, {samples.dtype}.",
            hint=f"for other data, use the view {RELABEL!r}",
        )
    if view == "rotate" and samples.shape[1] != samples.shape[2]:
        raise InputError(f"The view 'rotate' needs square images. Got {samples.shape[1]} x {samples.shape[2]} pixels.")
    return np.ascontiguousarray(_IMAGES[view](samples))


def meant(view: str, labels: IntArray, classes: int) -> IntArray:
    """Return labels as the clients of a view use them: with "relabel", class c becomes c + half of the classes.

    >>> meant("relabel", np.array([0, 3]), 4)
    array([2, 1])
    """
    return (labels + classes // 2) % classes if view == RELABEL else labels


@dataclass(frozen=True, kw_only=True)
class Shift(Parameterized):
    """Which views there are, and the share of clients with each; all other clients see the plain samples.

    >>> Shift(views=("rotate",), share=0.2).groups(10, np.random.default_rng(0)).names
    ('plain', 'rotate')
    """

    views: tuple[str, ...] = param((), Sequence(OneOf(VIEWS)), "how each group sees its samples; empty: no groups")
    share: float = param(0.1, Interval(float, 0, 1, "right"), "share of the clients in each group; at least one client")

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.views)) != len(self.views):
            raise ParameterError(f"The 'views' parameter of Shift must name each view once. Got {self.views}.")
        if len(self.views) * self.share > 1 + 1e-9:
            raise ParameterError(
                f"The 'share' parameter of Shift is for each view: {len(self.views)} views of {self.share:g} are more "
                "than all clients."
            )

    def describe(self) -> str:
        """Return one line."""
        return f"{', '.join(self.views)}: {self.share:.0%} of the clients each" if self.views else "none"

    def groups(self, clients: int, rng: np.random.Generator) -> Groups:
        """Draw the view of each client."""
        each = max(1, nearest(self.share * clients))
        if each * len(self.views) > clients:
            raise ScenarioError(
                f"The shift needs {len(self.views)} groups of {each:,} clients, but the federation has {clients:,}.",
                hint="use more clients, fewer views or a smaller share",
            )
        of = np.zeros(clients, dtype=np.int64)  # 0 is the plain view
        order = rng.permutation(clients)
        names = [name for name in self.views if name != PLAIN]
        # Disjoint parts of one random order, so that no client has two views.
        for place, name in enumerate(self.views):
            if name != PLAIN:
                of[order[place * each : (place + 1) * each]] = 1 + names.index(name)
        views = (PLAIN, *names)
        if not (of == 0).any():  # no client sees the plain samples, so there is no such group
            of, views = of - 1, tuple(names)
        return Groups("view", of, views, views)
