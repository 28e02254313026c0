"""The commands as a user of `fedcohort` calls them."""


def test_a_quick_benchmark_first_says_that_it_is_not_a_result(command, tmp_path):
    few = ("--selectors", "fedcbs", "--settings", "iid", "--processes", "1", "--device", "cpu")
    done = command("bench", "--quick", *few, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first = done.stdout.splitlines()[0]
    assert "--quick" in first and "no number here is a result" in first
    assert "fedcbs:" not in done.stdout  # no sentence about how it does


def test_hints_suggest_the_right_name(command, tmp_path):
    done = command("reproduce", "fedcor-tabel-1", cwd=tmp_path)
    assert done.returncode == 1 and "'fedcor-table-1" in done.stderr
