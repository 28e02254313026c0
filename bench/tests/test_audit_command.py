"""``fedcohort privacy-audit``: on a simulated federation and on the user's own counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedcohort.cli.app import app
from fedcohort.core.errors import InputError

SMALL = ["-s", "scenario.partition={name='dirichlet', clients=30, alpha=0.2}", "-s", "local.steps=5"]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["privacy-audit", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_simulated_federation() -> None:
    found = json.loads(run("--data", "digits", *SMALL, "--device", "cpu", "--format", "json", "--epsilon", "2"))
    by = {o["option"]: o for o in found["options"]}
    server = by["encrypted, S at the server"]["findings"][0]
    assert server["counts_found"] == 1.0 and not server["classes_named"] and len(server["error"]) == 30
    moot = by["updates in the clear, labels never asked for"]
    assert min(f["mean_error"] for f in moot["findings"]) < 0.5 * sum(found["ignorance"]) / 30
    assert moot["verdict"].startswith("Moot")
    assert by["noisy counts, epsilon 2"]["verdict"].startswith("Bounded")


def test_own_counts_and_table_per_client(tmp_path: Path) -> None:
    (tmp_path / "counts.csv").write_text("hospital,a,b,c\nnorth,9,1,0\nsouth,2,2,6\nwest,0,5,4\neast,7,0,2\n")
    text = run("--counts", str(tmp_path / "counts.csv"), "--clients")
    assert "north" in text and "Broken" in text and "Bounded" in text and "updates" not in text


@pytest.mark.parametrize("text", ["a,1,2\n", "a,1,2\nb,x,3\n", "a,1,2\nb,3\n"])
def test_bad_counts(tmp_path: Path, text: str) -> None:
    (tmp_path / "counts.csv").write_text(text)
    with pytest.raises(InputError, match="counts"):
        run("--counts", str(tmp_path / "counts.csv"))
    with pytest.raises(InputError, match="No such file"):
        run("--counts", str(tmp_path / "nothing.csv"))
