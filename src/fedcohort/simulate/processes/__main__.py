"""Start a worker: ``python -m fedcohort.simulate.processes``. Only the driver calls this.

The arguments are the descriptor of the connection to the driver, that of the file with the setup, and the device.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from multiprocessing.connection import Connection


def _create_context(device: str) -> None:
    """Create the CUDA context that torch is going to use; without a driver, do nothing."""
    with contextlib.suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        place, context = ctypes.c_int(), ctypes.c_void_p()
        driver.cuInit(0)
        driver.cuDeviceGet(ctypes.byref(place), int(device.partition(":")[2] or 0))
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), place)


def main() -> None:
    """Serve the driver that started this process."""
    connection, setup, device = sys.argv[1:]
    if device.startswith("cuda"):
        # This takes a second or more when many processes start, and so do the imports below: both at the same time.
        threading.Thread(target=_create_context, args=(device,), daemon=True).start()
    from fedcohort.simulate.processes.worker import serve

    with Connection(int(connection)) as driver:
        serve(driver, int(setup))
    # All files are closed. Tearing down Python, torch and CUDA would only keep the driver waiting.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
