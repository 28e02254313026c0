"""The class-by-client picture of a federation, for a browser and for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from fedcohort.core.arrays import IntArray
from fedcohort.core.errors import InputError, MissingExtraError
from fedcohort.scenario.federation import Federation

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_SHADES = " ░▒▓█"


def picture(
    federation: Federation,
    *,
    kind: Literal["bars", "bubbles"] = "bars",
    class_names: Sequence[str] | None = None,
    limit: int = 200,
    true: bool = False,
) -> Figure:
    """Draw how many samples of each class every client has.

    Parameters
    ----------
    federation : Federation
        The clients.
    kind : {"bars", "bubbles"}
        A stacked bar per client, or a bubble per client and class with an area in proportion to the samples.
    class_names : sequence of str, optional
        Names of the classes.
    limit : int
        At most so many clients are drawn, evenly spaced, and the title says so.
    true : bool
        The dataset's labels instead of those the clients see.

    Returns
    -------
    plotly.graph_objects.Figure
    """
    try:
        import plotly.graph_objects as go
    except ImportError as error:
        raise MissingExtraError(
            "Pictures need plotly, which is not installed.", hint='pip install "fedcohort[report]"'
        ) from error
    if kind not in ("bars", "bubbles"):
        raise InputError(f"The 'kind' of a picture must be 'bars' or 'bubbles'. Got {kind!r}.")
    shown = _spaced(len(federation), limit)
    counts = federation.label_counts(part="all", true=true)[shown]
    names = [federation.names[k] for k in shown]
    labels = _class_names(federation, class_names)
    title = f"{len(federation):,} clients, {len(federation.indices):,} samples"
    if len(shown) < len(federation):
        title += f" ({len(shown):,} clients shown)"
    figure = go.Figure()
    if kind == "bars":
        for c, label in enumerate(labels):
            figure.add_bar(x=names, y=counts[:, c], name=label)
        figure.update_layout(barmode="stack", yaxis_title="samples", bargap=0.1)
    else:
        client, row = np.nonzero(counts)
        figure.add_scatter(
            x=[names[k] for k in client],
            y=[labels[i] for i in row],
            mode="markers",
            marker={
                "size": counts[client, row],
                "sizemode": "area",
                "sizeref": 2.0 * max(int(counts.max(initial=1)), 1) / 24.0**2,
                "color": row,
            },
            text=[f"{n:,} samples" for n in counts[client, row]],
        )
        figure.update_layout(yaxis_title="class", yaxis={"type": "category"})
    figure.update_layout(title=title, xaxis_title="client", xaxis={"type": "category"}, template="plotly_white")
    return figure


def text_picture(federation: Federation, *, limit: int = 40, true: bool = False) -> str:
    """Return a line per client and a column per class, darker where more of the client's samples are.

    >>> print(text_picture(Federation.of([[0, 1, 2, 3], [4, 5]], labels=[0, 0, 0, 1, 2, 2], classes=3)))
    client  classes 0 to 2
    0       |▓░ |  4 samples
    1       |  █|  2 samples
    """
    shown = _spaced(len(federation), limit)
    counts = federation.label_counts(part="all", true=true)[shown]
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    # rounded up: anything above zero shows
    levels = np.minimum(np.ceil(shares * (len(_SHADES) - 1)).astype(int), len(_SHADES) - 1)
    names = [federation.names[k] for k in shown]
    width = max(6, *(len(name) for name in names))
    digits = len(f"{int(counts.sum(axis=1).max(initial=0)):,}")
    lines = [f"{'client':<{width}}  classes 0 to {federation.classes - 1}"]
    for k, (name, row) in enumerate(zip(names, levels, strict=True)):
        cells = "".join(_SHADES[level] for level in row)
        rate = float(federation.noise_rate[shown[k]])
        noise = f", {rate:.0%} wrong labels" if rate else ""
        lines.append(f"{name:<{width}}  |{cells}|  {int(counts[k].sum()):>{digits},} samples{noise}")
    if len(shown) < len(federation):
        lines.append(f"({len(shown):,} of {len(federation):,} clients)")
    return "\n".join(lines)


def _spaced(clients: int, limit: int) -> IntArray:
    if limit < 1:
        raise InputError(f"The 'limit' of a picture must be at least 1. Got {limit}.")
    if clients <= limit:
        return np.arange(clients)
    return np.linspace(0, clients - 1, limit).round().astype(np.int64)


def _class_names(federation: Federation, names: Sequence[str] | None) -> list[str]:
    if names is None:
        return [str(c) for c in range(federation.classes)]
    if len(names) != federation.classes:
        raise InputError(f"There are {federation.classes} classes and {len(names)} class names.")
    return list(names)
