"""These tests need nvflare, which `make hosts` installs into an environment of its own."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("nvflare") else ["*.py"]
collect_ignore = ["student.py"]  # a part of a job, which lies beside task.py
