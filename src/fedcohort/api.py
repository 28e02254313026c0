"""The main functions: compare selectors, run an experiment, extend it, read its results.

The command line does the same with the same defaults: ``fedcohort compare``, ``run`` and ``extend``.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcohort.core.errors import FedcohortError, InputError, MissingExtraError
from fedcohort.core.terminal import err, say
from fedcohort.core.text import short_repr
from fedcohort.simulate.store.results import Results, load

if TYPE_CHECKING:
    from fedcohort.simulate.config.experiment import Experiment
    from fedcohort.simulate.runner import Simulation

__all__ = ["compare", "extend", "load", "run", "simulator"]


def compare(
    selectors: Any = None,
    *,
    data: Any = None,
    label: str | None = None,
    client: str | None = None,
    task: str | Mapping[str, Any] | None = None,
    scenario: Any = None,
    partition: str | Mapping[str, Any] | None = None,
    clients: int | None = None,
    model: str | Mapping[str, Any] | None = None,
    rounds: int | None = None,
    cohort: int | None = None,
    seeds: int | Sequence[int] | None = None,
    targets: Sequence[float] | None = None,
    baseline: str | None = None,
    sweep: Mapping[str, Mapping[str, Sequence[Any]]] | None = None,
    overrides: Mapping[str, Any] | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    out: str | os.PathLike[str] | None = None,
    device: str | None = None,
    quiet: bool = False,
) -> Results:
    """Compare selectors on the same federation with the same seeds.

    Usually ``selectors`` is enough. The other arguments have the defaults of ``fedcohort compare``: the handwritten
    digits of scikit-learn, divided among 50 clients with two classes each. A paper's scenario includes its cohort size,
    local training and rounds. The defaults in use are printed.

    Parameters
    ----------
    selectors : sequence or mapping
        Names ("fedcor", "mine.py:Mine"), selectors (``create("fedcor", warmup=5)``), classes of selectors, or a mapping
        from labels to parameters: ``{"eager": {"name": "fedcor", "warmup": 5}}``.
    data : str, path, Dataset, DataFrame or tuple of arrays
        The name of a dataset ("digits", "fashion-mnist"), a file (.csv, .parquet, .npz), a
        :class:`~fedcohort.simulate.data.Dataset`, a pandas frame, or arrays ``(x, y)`` or
        ``(x, y, x_test, y_test)``.
    label, client : str
        Columns of a table: the label to predict, and the client of each row.
    task : str or mapping
        "classification" (default), "regression" or "next-token".
    scenario : str, Scenario or mapping
        A paper's setting by name ("fedcor-1spc"), or how the clients differ.
    partition : str or mapping
        How samples are divided among the clients, for example "iid" or ``{"name": "shards", "per_client": 1}``.
    clients : int
        Number of clients.
    model : str or mapping
        "mlp", "lenet", "net.py:Net", ...
    rounds, cohort : int
        Number of rounds, and of clients in each.
    seeds : int or sequence of int
        Number of seeds, or the seeds themselves.
    targets : sequence of float
        Accuracies (or values of the task's metric) for "rounds to target".
    baseline : str
        The selector that the others are compared with. Default: uniform, else the first.
    sweep : mapping
        Values of a selector's parameters; each value becomes a selector: ``{"fedcor": {"warmup": [5, 15]}}``.
    overrides : mapping
        Any other key of the configuration: ``{"local.lr": 0.1, "run.eval_every": 5}``.
    config : str, path or mapping
        A configuration to start from, instead of the defaults.
    out : str or path
        A new folder for the results. Default: a temporary folder that is deleted with the returned object.
    device : str
        "auto", "cpu", "cuda" or "cuda:N".
    quiet : bool
        Whether to hide progress and notes.

    Returns
    -------
    Results
        It shows its leaderboard in a notebook and when it is printed.

    Examples
    --------
    >>> import fedcohort as fc
    >>> results = fc.compare(["uniform", "fedcbs"], data="digits", rounds=2, seeds=2, quiet=True)
    >>> sorted(row.label for row in results.leaderboards()[0].rows)
    ['fedcbs', 'uniform']
    """
    simulator()  # first, so that a missing extra is the first error
    from fedcohort.simulate.comparison import compared

    experiment = compared(
        selectors=selectors,
        data=data,
        label=label,
        client=client,
        task=task,
        scenario=scenario,
        partition=partition,
        clients=clients,
        model=model,
        rounds=rounds,
        cohort=cohort,
        seeds=seeds,
        targets=targets,
        baseline=baseline,
        sweep=sweep,
        overrides=overrides,
        config=config,
    )
    return _run_new(experiment, out, device, quiet)


def run(
    experiment: str | os.PathLike[str] | Mapping[str, Any],
    *,
    overrides: Mapping[str, Any] | None = None,
    out: str | os.PathLike[str] | None = None,
    device: str | None = None,
    quiet: bool = False,
) -> Results:
    """Run an experiment, or continue one that was interrupted.

    Parameters
    ----------
    experiment : str, path or mapping
        A TOML file, the name of a built-in configuration ("demo"), a table with the keys of such a file, or the folder
        of an experiment to continue. In a table, ``data`` may also be a :class:`~fedcohort.simulate.data.Dataset`.
    overrides : mapping
        Keys of the configuration to change: ``{"run.rounds": 20}``.
    out, device, quiet
        As in :func:`compare`.
    """
    simulation = simulator().Simulation
    if isinstance(experiment, (str, os.PathLike)) and Path(experiment).is_dir():
        if overrides or out is not None:
            raise InputError(
                f"{os.fspath(experiment)} is an experiment to continue, which takes neither 'overrides' nor 'out'.",
                hint="extend() adds seeds, rounds and selectors",
            )
        return _finish(simulation.open(Path(experiment), device=device), quiet)
    from fedcohort.simulate.config.experiment import Experiment
    from fedcohort.simulate.config.toml import find_table, with_keys

    if isinstance(experiment, Mapping):
        table = dict(experiment)
    elif isinstance(experiment, (str, os.PathLike)):
        table = find_table(os.fspath(experiment))
    else:
        raise InputError(
            f"'experiment' must be a TOML file, a built-in name, a table or a folder. Got {short_repr(experiment)}."
        )
    return _run_new(Experiment.from_dict(with_keys(table, overrides or {})), out, device, quiet)


def extend(
    experiment: Results | str | os.PathLike[str],
    *,
    seeds: int | Sequence[int] | None = None,
    rounds: int | None = None,
    selectors: Any = None,
    device: str | None = None,
    quiet: bool = False,
) -> Results:
    """Add seeds, rounds or selectors to an experiment; only what is missing is computed.

    Parameters
    ----------
    experiment : Results, str or path
        The results, or their folder.
    seeds : int or sequence of int
        The total number of seeds, or a list of seeds to add.
    rounds : int
        The total number of rounds of each run.
    selectors : sequence or mapping
        Selectors to add, as in :func:`compare`.
    device, quiet
        As in :func:`compare`.
    """
    simulation = simulator().Simulation
    from fedcohort.simulate.config.selectors import selector_entries

    if seeds is None and rounds is None and selectors is None:
        raise InputError("extend() needs something to add.", hint="pass seeds, rounds or selectors")
    folder = experiment.path if isinstance(experiment, Results) else _folder("experiment", experiment)
    added = {} if selectors is None else selector_entries(selectors)
    extended = simulation.extend(
        folder, seeds=seeds, rounds=rounds, selectors=added, device=device, command=" ".join(sys.argv)
    )
    results = _finish(extended, quiet)
    # Both objects read one folder. If it is temporary, it must exist until both objects are gone.
    weakref.finalize(results, lambda earlier: None, experiment)
    return results


def simulator() -> Any:
    """Return the module that runs experiments; if it cannot be imported, the error names the missing extra."""
    try:
        from fedcohort.simulate import runner
    except ImportError as error:
        if isinstance(error, FedcohortError) or (error.name or "").startswith("fedcohort"):
            raise
        raise MissingExtraError(
            f"The simulator needs {error.name}, which is not installed.", hint="pip install 'fedcohort[sim]'"
        ) from error
    return runner


def _run_new(
    experiment: Experiment,
    out: str | os.PathLike[str] | None,
    device: str | None,
    quiet: bool,
) -> Results:
    # Results read their files when they are asked, so a temporary folder lives as long as they do.
    temporary = Path(tempfile.mkdtemp(prefix="fedcohort-")) if out is None else None
    folder = _folder("out", out) if temporary is None else temporary / "results"
    try:
        simulation = simulator().Simulation(experiment, folder, device=device, command=" ".join(sys.argv))
        results = _finish(simulation, quiet)
    except BaseException:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    if temporary is not None:
        weakref.finalize(results, shutil.rmtree, temporary, ignore_errors=True)
    return results


def _finish(simulation: Simulation, quiet: bool) -> Results:
    """Run an experiment to its end and return its results."""
    from fedcohort.simulate.play import play, say_notes

    console = err(quiet)
    # In Python, unlike on the command line, Ctrl-C must also end the cell or script that called.
    if play(simulation, console) == "interrupted":
        say(console, f"interrupted; results so far are in {simulation.out}, and run() with that folder continues")
        raise KeyboardInterrupt
    results = load(simulation.out)
    say_notes(simulation, console)
    for text in results.warnings():
        say(console, f"warning: {text}", style="yellow")
    return results


def _folder(argument: str, value: Any) -> Path:
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise InputError(f"'{argument}' must be a folder. Got {short_repr(value)}.")
    return Path(value)
