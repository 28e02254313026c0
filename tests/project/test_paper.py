"""The paper's numbers are those of the stored results, and its citations exist."""

import importlib.util
import re
from pathlib import Path

PAPER = Path(__file__).parents[2] / "paper"


def test_the_paper_is_what_its_command_writes():
    found = importlib.util.spec_from_file_location("paper_build", PAPER / "build.py")
    build = importlib.util.module_from_spec(found)
    found.loader.exec_module(build)
    written = (PAPER / "paper.md").read_text()
    assert build.text() == written, "python paper/build.py"
    assert (PAPER / "gains.svg").is_file() and "gains.svg" in written
    cited = set(re.findall(r"@(\w+)", written.split("---", 2)[2]))
    assert cited == set(re.findall(r"^@\w+\{(\w+),", (PAPER / "paper.bib").read_text(), re.M))
    assert 250 < len(written.split()) < 1000
