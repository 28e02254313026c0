"""Short ways to read and run experiments."""

from collections.abc import Mapping
from pathlib import Path

from fedcohort.simulate.config.experiment import Experiment
from fedcohort.simulate.config.toml import override, read_table
from fedcohort.simulate.runner import Simulation


def read(path, overrides=()):
    """Return the experiment of a TOML file, with ``key=value`` overrides."""
    return Experiment.from_dict(override(read_table(path), overrides))


def run_experiment(table, out, **options):
    """Run a configuration, given as a mapping or a file; return "finished" or "interrupted"."""
    experiment = Experiment.from_dict(table) if isinstance(table, Mapping) else read(table)
    return Simulation(experiment, Path(out), command="a test", **options).run()
