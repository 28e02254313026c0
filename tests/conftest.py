"""Shared by the tests."""

import os
import signal
import sys

import pytest


def _die_after(lines):
    left = [lines]

    def trace(frame, event, argument):
        left[0] -= 1
        if left[0] <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


@pytest.fixture
def die_after():
    """Return a function that kills the process with SIGKILL when so many more lines of Python have run."""
    return _die_after
