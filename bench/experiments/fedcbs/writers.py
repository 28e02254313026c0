"""FEMNIST split by writer, as LEAF's ``-t user`` does.

Every ninth writer is for testing; the others keep all their images.

    python bench/experiments/fedcbs/writers.py DATA/femnist.npz FOLDER

writes FOLDER/femnist.npz. It reads those of the parts train, test and extra that the source has.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np


def main(source, folder):
    read = np.load(source)
    parts = [part for part in ("train", "test", "extra") if f"x_{part}" in read]
    x, y, w = (np.concatenate([read[f"{name}_{part}"] for part in parts]) for name in "xyw")
    test = w % 9 == 8
    split = {f"{name}_train": array[~test] for name, array in (("x", x), ("y", y), ("w", w))}
    split |= {f"{name}_test": array[test] for name, array in (("x", x), ("y", y), ("w", w))}
    Path(folder).mkdir(parents=True, exist_ok=True)
    np.savez_compressed(Path(folder) / "femnist.npz", **split, writers=read["writers"])


if __name__ == "__main__":
    main(*sys.argv[1:])
