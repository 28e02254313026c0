"""The configuration of an experiment: TOML, overrides, sweeps, and the runs they describe."""
