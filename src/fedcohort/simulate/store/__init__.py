"""An experiment's directory: how it is written and read."""
