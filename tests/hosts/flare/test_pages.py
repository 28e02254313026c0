"""The commands of docs/flare.md, as printed, in FLARE's simulator with its real processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from fedcohort.core.protocol import Status
from fedcohort.journal import read_journal

PAGE = (Path(__file__).parents[3] / "docs" / "flare.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_commands_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "fedcohort").write_text(f'#!/bin/sh\nexec {sys.executable} -m fedcohort "$@"\n')
    (tmp_path / "bin" / "fedcohort").chmod(0o755)
    env = {
        **os.environ,
        "HOME": str(tmp_path),
        "PATH": os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "NVFLARE_SIMULATOR_WORKSPACE_ROOT": str(tmp_path / "workspace"),
        "OMP_NUM_THREADS": "1",
    }
    lines = re.findall(r"^\$ (.*)$", PAGE, re.MULTILINE)
    assert lines[0].startswith("pip install") and len(lines) == 3  # installed where this test runs
    for line in lines[1:]:
        done = subprocess.run(line, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{line}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    (journal,) = (tmp_path / ".fedcohort").glob("**/*.sqlite")
    with closing(read_journal(journal)) as record:
        assert record.events("ended")[-1]["state"] == "finished"
        assert {reply.status for reply in record.replies()} == {Status.OK}
