"""Memory that worker processes share with their parent: anonymous files that both map, freed with the last of them."""

from __future__ import annotations

import math
import mmap
import os
import sys
import tempfile

import numpy as np
import torch

DTYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64, "uint8": torch.uint8}


class SharedBlock:
    """One mapped anonymous file, seen as a tensor.

    Parameters
    ----------
    size : int
        Bytes.
    fd : int, optional
        An open file of that size to map, instead of a new one; the block owns it from now on.
    """

    def __init__(self, size: int, fd: int | None = None) -> None:
        self.size = max(size, 1)
        if fd is None:
            fd = _anonymous_file()
            os.ftruncate(fd, self.size)
        self.fd = fd
        self._map = mmap.mmap(fd, self.size)

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """View the first bytes as a tensor."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count).view(shape)

    def array(self, dtype: str, shape: tuple[int, ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
        """View the first bytes as an array."""
        return np.frombuffer(self._map, dtype=dtype, count=math.prod(shape)).reshape(shape)

    @property
    def in_use(self) -> bool:
        """Whether a tensor or an array looks at this memory."""
        return sys.getrefcount(self._map) > 2  # that of this block, and that of the call

    def __del__(self) -> None:
        # The mapping itself lives as long as a tensor looks at it; the descriptor is only needed to pass it on.
        fd, self.fd = getattr(self, "fd", -1), -1
        if fd >= 0:
            os.close(fd)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("fedcohort", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
