"""The tutorial notebook runs unchanged in its own kernel, and shows progress."""

import io
import re
import tomllib
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from rich.console import Console

from fedcohort.simulate.progress import Progress
from fedcohort.simulate.store.results import RunInfo

NOTEBOOK = Path(__file__).parents[2] / "examples" / "tutorial.ipynb"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """The outputs of each code cell."""
    folder = tmp_path_factory.mktemp("notebook")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(folder / "ipython"))
        patch.setenv("TMPDIR", str(folder))
        notebook = nbformat.read(NOTEBOOK, as_version=4)
        NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    first, *others = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not first.outputs  # it is installed here
    return [cell.outputs for cell in others]


def html_of(cell):
    return "".join(out.data.get("text/html", "") for out in cell if "data" in out)


def test_progress_ends_where_the_experiment_does(outputs):
    (drawn,) = [out for out in outputs[0] if "<progress" in out.get("data", {}).get("text/html", "")]
    assert "finished: 270 of 270 rounds" in drawn.data["text/html"]
    assert "<td style='text-align:left'>balanced</td><td>30</td>" in drawn.data["text/html"]


def test_results_and_pictures_show_themselves(outputs):
    pages = [html_of(cell) for cell in outputs]
    assert "Gain over uniform" in pages[1].replace("&#8209;", "-")
    assert any("<iframe" in page or "<svg" in page for page in pages[4:6])
    assert any("fedcbs exploration=10" in page for page in pages)
    assert "fedcor" in pages[-2]
    assert "<iframe" in pages[-1] or "<svg" in pages[-1]  # the last step shows who was picked
    said = "".join(out.get("text", "") for out in outputs[-1])
    assert "drawn at random, place by place" in said


def test_its_first_code_installs_what_is_missing():
    first = next(cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code")
    extras = tomllib.loads((NOTEBOOK.parents[1] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (named,) = re.findall(r"%pip install -q \"fedcohort\[([a-z,]+)\]\"", first.source)
    assert set(named.split(",")) <= set(extras) and "find_spec" in first.source


def test_the_notebook_is_kept_without_outputs():
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None


def test_outside_a_notebook_it_prints_lines(monkeypatch):
    screen = io.StringIO()
    progress = Progress(Console(file=screen, width=100))
    clock = iter(range(0, 1000, 20))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    runs = [RunInfo(f"uniform-s{seed}", "uniform", "uniform", seed) for seed in range(2)]
    progress.on_start(runs, 0, 10)
    ended = RunInfo("uniform-s0", "uniform", "uniform", 0, rounds_done=1, state="diverged")
    progress.on_round(ended, {"accuracy": 0.5})
    progress.on_end("interrupted")
    assert screen.getvalue().startswith("running: 1 of 6 rounds, ")
    assert "<td>0</td><td>50.0%</td><td>diverged</td>" in progress._repr_html_()
