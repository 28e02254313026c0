"""Studies: the benchmark, the papers' tables and figures, and analyses of one federation."""
