"""Next-character prediction over the source of Python's standard library.

Every client is a module, its text the first 2,000 characters of the module's source; a small recurrent network learns
to write the next character. Run it with::

    python examples/characters.py

or from the command line, in this folder::

    fedcohort run characters.toml
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import numpy as np
import torch
from torch import nn

import fedcohort as fc
from fedcohort.simulate.data import Dataset, Source

MODULES = [
    "argparse", "ast", "bisect", "calendar", "configparser", "copy", "csv", "dataclasses", "difflib", "doctest",
    "fractions", "functools", "gettext", "heapq", "inspect", "json.decoder", "numbers", "pickle", "random", "shlex",
    "smtplib", "statistics", "string", "subprocess", "tarfile", "textwrap", "threading", "typing", "unittest.mock",
    "urllib.parse",
]  # fmt: skip
LENGTH = 32
CHARACTERS = "\n !\"#$%&'()*+,-./0123456789:;<=>?@[\\]^_`abcdefghijklmnopqrstuvwxyz{|}~"


def text_of(name: str) -> str:
    """Return the source of a module in lower case, reduced to the known characters."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    return "".join(c for c in Path(spec.origin).read_text().lower() if c in CHARACTERS)


class Modules(Source):
    """Windows of source code: characters 0 .. 31 of each are the input, characters 1 .. 32 the target."""

    name = "modules"

    def load(self, folder: str | os.PathLike[str] | None = None, download: bool = False) -> Dataset:
        """Return the windows; each belongs to the client that is its module."""
        windows, owners = [], []
        for name in MODULES:
            codes = np.array([CHARACTERS.index(c) for c in text_of(name)], np.int64)
            for start in range(0, min(len(codes), 2_000) - LENGTH, LENGTH):
                windows.append(codes[start : start + LENGTH + 1])
                owners.append(name)
        text = np.stack(windows)
        return fc.from_arrays(
            text[:, :-1], text[:, 1:], name="modules", target="token", classes=len(CHARACTERS), writers=owners
        )


class Writer(nn.Module):
    """An embedding, a recurrent layer, and a score for every character at every place."""

    def __init__(self, shape: tuple[int, ...], characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, 24)
        self.memory = nn.GRU(24, 48, batch_first=True)
        self.scores = nn.Linear(48, characters)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """(n, length) characters -> (n, length, characters) scores."""
        return self.scores(self.memory(self.embedding(text))[0])


def main(rounds: int = 10) -> None:
    """Compare two selectors and print the leaderboard."""
    here = Path(__file__).resolve()
    table = {
        "name": "characters",
        "seeds": [0, 1],
        "data": f"{here}:Modules",
        "task": "next-token",
        "model": f"{here}:Writer",
        "scenario": {"partition": {"name": "natural"}},
        "local": {"epochs": 1, "batch_size": 8, "lr": 0.5},
        "run": {
            "rounds": rounds,
            "cohort": 6,
            "eval_every": 5,
            "workers": 1,
        },  # a network this small gains nothing from more
        "selectors": {"uniform": {}, "power-of-choice": {}},
    }
    print(fc.run(table))


if __name__ == "__main__":
    main()
