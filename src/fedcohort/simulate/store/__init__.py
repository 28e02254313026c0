"""An experiment's directory: written once, read by everybody."""
