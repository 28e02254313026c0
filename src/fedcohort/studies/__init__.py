"""Experiments with a question: the benchmark, the papers' tables, and analyses of one federation."""
