"""The research around fedcohort: the benchmark, the papers' tables and figures, datasets with real owners, attacks."""
