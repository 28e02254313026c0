"""Derive random streams from (seed, stream, position), so that a resumed run needs no saved generator state.

Selection, availability, latency, data and training draw from separate streams. Two selectors under the same seed
therefore see the same federation, however many numbers each of them draws.
"""

from __future__ import annotations

import zlib

import numpy as np

# Never rename these: every random number of a run follows from them, and journals are replayed to check it.
SELECTION = "selection"
QUERY = "query"
INITIALISATION = "initialisation"
AVAILABILITY = "availability"
LATENCY = "latency"
FAILURE = "failure"
DATA = "data"
TRAINING = "training"
AUGMENTATION = "augmentation"
MODEL = "model"
RULES = "rules"
LABELS = "labels"
ATTRIBUTES = "attributes"
DEVICES = "devices"


def stream(seed: int, name: str, *position: int) -> np.random.Generator:
    """Return the generator of stream ``name`` at ``position`` (a round, a client, ...).

    Parameters
    ----------
    seed : int
        The experiment's seed, non-negative.
    name : str
        Which stream; different names give independent numbers.
    *position : int
        Non-negative integers that locate the draw, for example the round.

    Examples
    --------
    >>> float(stream(1, "latency", 7).random()) == float(stream(1, "latency", 7).random())
    True
    >>> float(stream(1, "latency", 7).random()) == float(stream(1, "latency", 8).random())
    False
    """
    # hash() would differ between processes.
    key = (zlib.crc32(name.encode()), *position)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))
