"""The commands report, explain and dashboard as a user types them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

import httpx
import pytest
import typer
from typer.testing import CliRunner

from fedcohort.cli.dashboard import dashboard
from fedcohort.cli.explain import explain
from fedcohort.cli.report import report
from fedcohort.core.errors import FedcohortError

app = typer.Typer()
app.command()(report)
app.command()(explain)
app.command()(dashboard)


def call(*arguments):
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def test_report_writes_the_page_and_prints_where(experiment, tmp_path):
    done = call("report", experiment, "-o", tmp_path / "out" / "r.html", "--target", "0.3")
    assert done.stdout.strip() == str(tmp_path / "out" / "r.html")
    assert "to 30%" in done.stderr and "fedcbs" in done.stderr
    assert (tmp_path / "out" / "r.html").read_text().startswith("<!doctype html>")


def test_report_as_json(experiment, tmp_path):
    done = call("report", experiment, "-o", tmp_path / "r.html", "--format", "json", "--quiet")
    found = json.loads(done.stdout)
    assert found["leaderboards"][0]["baseline"] == "uniform" and len(found["leaderboards"][0]["rows"]) == 7


@pytest.mark.parametrize(("form", "sign"), [("latex", r"\toprule"), ("markdown", "| Selector |"), ("csv", "Selector,")])
def test_tables_on_stdout(experiment, tmp_path, monkeypatch, form, sign):
    monkeypatch.chdir(tmp_path)
    done = call("report", experiment, "--tables", form)
    assert sign in done.stdout and not (tmp_path / "report.html").exists()


def test_report_on_a_folder_without_results(tmp_path):
    with pytest.raises(FedcohortError, match="empty"):
        call("report", tmp_path)


def test_explain_in_the_terminal_and_as_json(experiment):
    done = call("explain", experiment, "--run", "fedcm-ts-s1", "--round", "9", "--nearly", "2")
    assert "Round 9: 5 of 20 candidates were picked." in done.stdout
    assert "exploration" in done.stdout and "shadow uniform would have picked" in done.stdout
    assert done.stdout.count(" yes ") == 5 and done.stdout.count(" no ") == 2
    one = call("explain", experiment, "--run", "fedcm-ts-s1", "--round", "9", "--client", "3", "--format", "json")
    found = json.loads(one.stdout)
    assert found["client"] == 3 and "Client 3 was" in found["reason"]


def test_explain_shows_the_requested_client_even_with_a_low_rank(experiment):
    path = experiment / "journal" / "fedcm-ts-s1.sqlite"
    whole = json.loads(call("explain", path, "--round", "9", "--nearly", "15", "--format", "json").stdout)
    last = whole["nearly"][-1]["name"]
    done = call("explain", path, "--round", "9", "--client", last, "--nearly", "1")
    assert f"Client {last} was not picked" in done.stdout
    assert any(line.split()[:2] == [last, "no"] for line in done.stdout.splitlines())


def test_dashboard_is_not_public_without_a_token(tmp_path, monkeypatch):
    monkeypatch.delenv("FEDCOHORT_TOKEN", raising=False)
    with pytest.raises(FedcohortError, match="without a token"):
        call("dashboard", tmp_path, "--host", "0.0.0.0")


def test_report_that_cannot_be_written(small, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FedcohortError, match="written"):
        call("report", small, "-o", tmp_path / "file" / "report.html", "-q")


def test_a_port_in_use_is_reported_first(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(FedcohortError, match="listen"):
            call("dashboard", tmp_path, "--port", taken.getsockname()[1])


def test_dashboard_starts_and_ends_cleanly(tmp_path):
    code = (
        "import sys; from fedcohort.report.dashboard.server import serve; "
        "serve(sys.argv[1], port=0, announce=lambda address: print(address, flush=True))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        address = child.stdout.readline().strip()
        with httpx.stream("GET", f"{address}/events", timeout=20) as events:
            lines = events.iter_lines()  # kept, because a forgotten iterator would close the stream
            assert next(lines).startswith("event: overview")
            os.kill(child.pid, signal.SIGINT)  # an open stream must not hold it up
            assert child.wait(60) in (0, 1, 130, -signal.SIGINT)
        said = child.stderr.read()
        assert "ERROR:" not in said, said  # the web server's own complaints; Python's word on the interrupt is fine
    finally:
        child.kill()
        child.communicate()


def test_tables_are_printed_with_the_method_and_the_setup(experiment):
    text = call("report", experiment, "--tables", "latex", "-q").stdout
    assert text.startswith("We compare") and text.count(r"\begin{table}") == 3 and "Bold: the best mean." in text
    assert call("report", experiment, "--tables", "csv", "-q").stdout.startswith("Selector,Terminal")
