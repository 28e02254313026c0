"""A short way to run an experiment."""

from collections.abc import Mapping
from pathlib import Path

from fedcohort.simulate.config.experiment import Experiment, read
from fedcohort.simulate.runner import Simulation


def run_experiment(table, out, **options):
    """Run a configuration, given as a mapping or a file; return "finished" or "interrupted"."""
    experiment = Experiment.from_dict(table) if isinstance(table, Mapping) else read(table)
    return Simulation(experiment, Path(out), command="a test", **options).run()
