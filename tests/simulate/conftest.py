"""What several tests of the simulator share."""

import pytest

from fedcohort.simulate.data import FashionMnist


@pytest.fixture
def nothing_but_the_test_folder(monkeypatch, tmp_path):
    """No test finds a dataset that happens to be on the machine, unless it asks for it."""
    monkeypatch.delenv("FEDCOHORT_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(FashionMnist, "system", "no/such/folder")
