"""The commands run, compare and analytics as a user calls them."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from rich.console import Console

from fedcohort.report.dashboard.watcher import Watcher
from fedcohort.report.data import is_orphaned
from fedcohort.simulate.progress import Progress
from fedcohort.simulate.store.results import RunInfo, load

CONFIG = """
name = "tiny"
seeds = [0, 1]
[data]
name = "synthetic"
samples = 300
test_samples = 80
classes = 4
shape = [6]
[scenario]
partition = {name = "shards", clients = 10, per_client = 2}
[model]
name = "logistic"
[local]
steps = 3
batch_size = 8
lr = 0.1
[run]
rounds = 5
cohort = 3
targets = [0.3]
workers = 1
device = "cpu"
[selectors.uniform]
[selectors.fedcbs]
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(CONFIG)
    return path


def test_run_prints_data_on_stdout_and_messages_on_stderr(command, config, tmp_path):
    done = command("run", config, "--out", tmp_path / "out", "--format", "json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["out"] == str(tmp_path / "out")
    (board,) = data["leaderboards"]
    assert {row["label"] for row in board["rows"]} == {"uniform", "fedcbs"}
    assert board["rows"][0]["best"]["seeds"] == 2
    assert "results in" in done.stderr
    assert load(tmp_path / "out").meta["command"].startswith("fedcohort run")


def test_run_prints_a_table_and_chooses_a_directory(command, config, tmp_path):
    done = command("run", config, "-s", "run.rounds=2", "--quiet", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "to 30%" in done.stdout and "uniform" in done.stdout and "fedcbs" in done.stdout
    assert done.stderr == ""
    (out,) = (tmp_path / "runs").iterdir()
    assert out.name.startswith("tiny-")
    assert load(out).rounds.num_rows == 2 * 2 * 2


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["run"], 2, "--resume"),
        (["run", "{config}", "--resume", "x"], 2, "--resume"),
        (["run", "{config}", "-s", "run.round=3"], 1, "did you mean 'rounds'"),
        (["run", "{config}", "--device", "cuda:9"], 1, "cuda"),
        (["run", "nothing.toml"], 1, "There is no configuration"),
        (["run", "--resume", "nowhere"], 1, "There is no experiment"),
        (["compare", "{config}", "--selectors", "unifrom"], 1, "did you mean 'uniform'"),
        (["compare", "{config}", "--selectors", "uniform,,fedcbs"], 2, "separated by commas"),
        (["compare", "{config}", "--seeds", "many"], 2, "'many'"),
        (["compare", "{config}", "--targets", "high"], 2, "must be numbers"),
        (["compare", "{config}", "--rounds", "0"], 2, "--rounds"),
        (["run", "{config}", "--engine", "cloud"], 1, "'engine' parameter"),
    ],
)
def test_mistakes_have_exit_codes_and_hints(command, config, tmp_path, arguments, code, message):
    done = command(*[a.format(config=config) for a in arguments], cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_diverged_run_gives_exit_code_three(command, config, tmp_path):
    done = command("run", config, "--out", tmp_path / "out", "-s", "local.lr=3e38")
    assert done.returncode == 3
    assert "diverged" in done.stderr and "diverged" in done.stdout


def test_ctrl_c_writes_a_checkpoint_and_says_how_to_resume(config, tmp_path):
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-m", "fedcohort.cli.app", "run", str(config), "--out", str(out), "-s", "run.rounds=100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "300"},
    )
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if (out / "status.json").exists() and load(out).status.get("rounds_done", 0) > 0:
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert f"fedcohort run --resume {out}" in errors
    status = load(out).status
    assert status["state"] == "interrupted"
    assert load(out).rounds.num_rows == status["rounds_done"] > 0


def test_kill_dash_nine_loses_nothing_in_a_checkpoint(command, config, tmp_path):
    change = ["-s", "run.rounds=60", "-s", "run.checkpoint_seconds=0.0"]
    assert command("run", config, "--out", tmp_path / "whole", *change).returncode == 0
    out = tmp_path / "killed"
    process = subprocess.Popen(
        [sys.executable, "-m", "fedcohort.cli.app", "run", str(config), "--out", str(out), "--quiet", *change],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and len(list((out / "rounds").glob("part-*"))) < 10:
            assert process.poll() is None
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    assert load(out).status["state"] == "running"  # nobody was left to say otherwise
    watcher = Watcher(out)
    watcher.poll()
    (item,) = watcher.items.values()
    assert item.overview()["state"] == "killed" and item.overview()["left"] is None
    assert is_orphaned(out, load(out).status) and not is_orphaned(out, {**load(out).status, "host": "another"})
    assert command("run", "--resume", out, "--quiet").returncode == 0
    tables = [load(path).rounds.drop_columns(["selection_seconds"]).to_pylist() for path in (out, tmp_path / "whole")]
    one, other = (sorted(rows, key=lambda row: (row["run"], row["round"])) for rows in tables)
    assert one == other


def test_resume_continues_to_the_end(command, config, tmp_path):
    from fedcohort.simulate.rounds.listener import Listener
    from fedcohort.simulate.runner import Simulation
    from tests.experiments import read

    class Stop(Listener):
        def on_round(self, run, row):
            simulation.stop()

    simulation = Simulation(read(config), tmp_path / "out", listeners=[Stop()])
    assert simulation.run() == "interrupted"
    done = command("run", "--resume", tmp_path / "out", "--format", "json")
    assert done.returncode == 0, done.stderr
    assert load(tmp_path / "out").rounds.num_rows == 4 * 5


def test_compare_takes_names_and_makes_the_comparison_fair(command, config, tmp_path):
    done = command(
        *("compare", config, "--selectors", "uniform,flash,fedcm-ts", "--seeds", "1", "--rounds", "2"),
        *("--out", tmp_path / "out", "--format", "json"),
    )
    assert done.returncode == 0, done.stderr
    assert "holds out 10%" in done.stderr and "the server keeps 20 samples" in done.stderr
    found = load(tmp_path / "out")
    assert [run.label for run in found.runs] == ["uniform", "flash", "fedcm-ts"]
    assert found.config["selectors"]["fedcm-ts"]["filter"]["name"] == "fedca"
    assert found.config["scenario"]["validation"] == 0.1
    assert len({run.federation for run in found.runs}) == 1


def test_compare_says_who_needs_samples_at_the_server(command, tmp_path):
    """Who sets none gets 20 for one of the default selectors, and a small class does not have that many."""
    rows = [f"{i % 7},{i % 5},{label}" for i, label in enumerate([0] * 60 + [1] * 60 + [2] * 10)]
    own = tmp_path / "own.csv"
    own.write_text("\n".join(["a,b,label", *rows]) + "\n")
    asked = ("compare", "--data", own, "--clients", "5", "--seeds", "1", "--rounds", "2", "--out", tmp_path / "out")
    none = ("-s", "scenario.server_validation=0")
    done = command(*asked, *none)
    said = " ".join(done.stderr.split())
    assert done.returncode == 1 and "cannot keep 20 samples of each class: class 2 has only" in said
    assert "leave out selectors whose filter needs these samples, such as fedcm-ts" in said
    assert command(*asked, *none, "--selectors", "uniform,fedcbs").returncode == 0  # as the hint says


def test_compare_on_a_preset_and_another_dataset(command, tmp_path):
    done = command(
        *("compare", "--data", "synthetic", "--scenario", "fedcor-1spc", "--selectors", "uniform", "--seeds", "2,5"),
        *("--rounds", "2", "--cohort", "4", "--targets", "0.1,0.2", "--model", "logistic"),
        *("-s", "data.samples=1000", "--out", tmp_path / "out", "--quiet"),
    )
    assert done.returncode == 0, done.stderr
    found = load(tmp_path / "out")
    assert [run.id for run in found.runs] == ["uniform-s2", "uniform-s5"]
    assert found.federation("uniform-s2").sizes.shape == (100,)
    assert "to 10%" in done.stdout and "to 20%" in done.stdout


def test_analytics_ranks_clients(command, config):
    done = command("analytics", config, "--rounds", "4", "--show", "2")
    assert done.returncode == 0, done.stderr
    assert "least to the most skewed" in done.stdout and "..." in done.stdout
    assert "rank correlation" in done.stderr
    data = json.loads(command("analytics", config, "--rounds", "4", "--format", "json").stdout)
    assert len(data["clients"]) == 10
    assert [row["rank"] for row in data["clients"]] == list(range(1, 11))


def test_analytics_of_a_journal(command, config, tmp_path):
    out = tmp_path / "out"
    compared = command("compare", config, "--selectors", "fedacs,uniform", "--seeds", "1", "--out", out)
    assert compared.returncode == 0, compared.stderr
    done = command("analytics", "--journal", out / "journal" / "fedacs-s0.sqlite", "--format", "json")
    assert done.returncode == 0, done.stderr
    assert sum(row["rounds"] for row in json.loads(done.stdout)["clients"]) == 5 * 3
    refused = command("analytics", "--journal", out / "journal" / "uniform-s0.sqlite")
    assert refused.returncode == 1
    assert "fedacs" in refused.stderr


def test_live_progress_draws_and_counts_runs_that_end_early():
    screen = io.StringIO()
    progress = Progress(Console(file=screen, force_terminal=True, width=100))
    runs = [RunInfo(f"uniform-s{seed}", "uniform", "uniform", seed) for seed in range(2)]
    progress.on_start(runs, 0, 10)
    progress.on_round(replace(runs[0], rounds_done=1), {"accuracy": 0.5})
    for _ in range(2):  # another process hands over both of its rounds with the state that the run has reached
        progress.on_round(replace(runs[1], rounds_done=2, state="diverged"), {"accuracy": None})
    progress.on_round(replace(runs[0], rounds_done=2), {"accuracy": None})
    Console(file=screen, width=100).print(progress)
    progress.on_end("finished")
    shown = screen.getvalue()
    assert "50.0%" in shown and "diverged" in shown
    assert "4 of 7 rounds" in shown  # five of the first, two of the second


def test_no_torch_is_needed_to_read_results():
    code = "import sys, fedcohort.cli.app, fedcohort.simulate.leaderboard; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
