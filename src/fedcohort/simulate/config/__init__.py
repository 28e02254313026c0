"""The configuration of an experiment: TOML, overrides, sweeps, and the runs it stands for."""
