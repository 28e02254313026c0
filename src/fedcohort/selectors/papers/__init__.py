"""The systems of the five papers, each under its own name."""
