"""Let several processes compute on one CUDA device at the same time.

By default a GPU serves processes in turns, so the small kernels of one process leave most of it idle. NVIDIA's
Multi-Process Service (MPS) runs them in parallel. This module starts the service for the duration of an experiment, if
the driver includes it. Without it everything works in the same way, only slower.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

_CONTROL = "nvidia-cuda-mps-control"
_PIPES = "CUDA_MPS_PIPE_DIRECTORY"
_SECONDS = 20.0


@contextmanager
def shared_device(device: str) -> Iterator[dict[str, str]]:
    """Yield the environment variables that let processes share a CUDA device; empty for the CPU or without MPS."""
    control = shutil.which(_CONTROL)
    if not device.startswith("cuda") or control is None or _PIPES in os.environ:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="fedcohort-mps-") as folder:
        variables = {_PIPES: folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        environment = {**os.environ, **variables}
        try:
            subprocess.run([control, "-d"], env=environment, check=True, capture_output=True, timeout=_SECONDS)
        except (OSError, subprocess.SubprocessError) as error:
            log.info("processes take turns on the GPU, because %s cannot be started: %s", _CONTROL, error)
            yield {}
            return
        try:
            yield variables
        finally:
            try:
                subprocess.run(
                    [control], input=b"quit\n", env=environment, check=True, capture_output=True, timeout=_SECONDS
                )
            except (OSError, subprocess.SubprocessError) as error:
                log.warning("%s in %s did not stop: %s", _CONTROL, folder, error)
