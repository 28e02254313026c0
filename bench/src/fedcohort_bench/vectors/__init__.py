"""Test vectors for every selector, and a check of other people's implementations against ours.

A vector is a JSON file that needs none of our code to read; ``docs/vectors.md`` describes it.
"""

from fedcohort_bench.vectors.files import DATA, verify, write
from fedcohort_bench.vectors.strangers import Report, check_as, load_stranger

__all__ = ["DATA", "Report", "check_as", "load_stranger", "verify", "write"]
