"""The commands list and check, as a user runs them."""

import json
import subprocess
import sys

import pytest


@pytest.fixture
def fedcohort(command):
    """The command line in this process, because starting another takes seconds."""

    def call(*arguments, cwd=None):
        done = command(*arguments, cwd=cwd)
        return done.returncode, done.stdout, done.stderr

    return call


def another_process(*arguments, cwd=None):
    done = subprocess.run(
        [sys.executable, "-m", "fedcohort.cli.app", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_list_names_every_selector(fedcohort):
    code, out, _ = fedcohort("list", "--format", "json")
    entries = json.loads(out)
    assert code == 0
    assert {"uniform", "power-of-choice", "fedcor"} <= {e["name"] for e in entries}
    poc = next(e for e in entries if e["name"] == "power-of-choice")
    assert poc["signals"] == ["loss-query", "sizes"] and poc["parameters"][0]["name"] == "d"


@pytest.mark.parametrize("kind", ["filters", "aggregators", "partitions", "presets", "datasets", "models"])
def test_every_kind_can_be_listed(fedcohort, kind):
    code, out, err = fedcohort("list", kind, "--format", "json")
    assert code == 0, err
    assert json.loads(out)


def test_list_says_which_selectors_leave_clients_out(fedcohort):
    _, out, _ = fedcohort("list", "selectors", "fedacs")
    assert "may leave clients out: a client that keeps losing its duels" in " ".join(out.split())
    _, out, _ = fedcohort("list", "selectors", "uniform")
    assert "leave clients out" not in out


def test_one_selector_is_shown_with_its_parameters(fedcohort):
    code, out, _ = fedcohort("list", "selectors", "active-fl")
    assert code == 0 and "alpha1" in out and "fraction of clients dropped" in out.replace("\n", " ")


def test_a_typo_gets_a_hint_and_no_traceback(fedcohort):
    code, out, err = fedcohort("list", "selectors", "unifrom")
    assert code == 1 and out == ""
    assert "There is no selector 'unifrom'" in err and "hint: did you mean 'uniform'?" in err
    assert "Traceback" not in err
    code, _, err = another_process("--debug", "list", "selectors", "unifrom")
    assert code == 1 and "Traceback" in err


def test_wrong_usage_is_exit_code_2(fedcohort):
    assert fedcohort("nonsense")[0] == 2
    assert fedcohort("list", "nonsense")[0] == 2
    assert fedcohort("check")[0] == 2


def test_check_passes_a_registered_selector(fedcohort):
    code, out, err = fedcohort("check", "uniform")
    assert code == 0 and "relabelling" in out and "passes all" in err


def test_check_finds_the_mistakes_in_a_file(fedcohort, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n"
        "from fedcohort import Cohort, Selector\n"
        "from fedcohort.selectors.baselines.uniform import NoState\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class First(Selector[NoState]):\n"
        "    def init(self, clients, rng): return NoState()\n"
        "    def select(self, state, slate, answer, rng): return Cohort(slate.candidates[:slate.size]), state\n"
        "    def update(self, state, outcome): return state\n"
    )
    code, out, _ = fedcohort("check", "mine.py:First", "--format", "json", cwd=tmp_path)
    result = json.loads(out)
    failed = {c["check"] for c in result["checks"] if not c["passed"]}
    assert code == 1 and not result["passed"]
    assert failed == {"relabelling", "everybody-eventually", "documentation"}
    code, _, _ = another_process("check", "mine:First", cwd=tmp_path)
    assert code == 1


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("none.py:X", "There is no file 'none.py'"),
        ("no.such.module:X", "cannot be imported"),
        ("json:X", "has no class 'X'"),
        ("json:JSONDecoder", "is the class JSONDecoder, not a Selector"),
        ("powr-of-choice", "There is no selector"),
        ("my.toml", "'fedcohort run my.toml' checks a configuration"),
    ],
)
def test_bad_targets(fedcohort, target, message, tmp_path):
    code, _, err = fedcohort("check", target, cwd=tmp_path)
    assert code == 1 and message in " ".join(err.split())


def test_help_and_version(fedcohort):
    code, out, _ = another_process("--help")
    assert code == 0 and "list" in out and "check" in out
    code, out, _ = fedcohort("--version")
    assert code == 0 and out.count(".") == 2


def test_list_says_where_a_selector_comes_from(fedcohort):
    _, out, _ = fedcohort("list", "--format", "json")
    origins = {e["name"]: e["origin"] for e in json.loads(out)}
    assert {origins[name] for name in ("flash", "fedacs", "fedcbs", "fedcor", "fedcm-ts")} == {"paper"}
    assert {origins[name] for name in ("oort", "e3cs", "uniform")} == {"baseline"}
    ours = {"balanced", "bounded", "fedcbs-blind", "flash-advantage", "fedcbs-chance"}
    assert {origins[name] for name in ours} == {"ours"}
    _, out, _ = fedcohort("list", "selectors", "bounded")
    assert "from: ours" in out


def test_list_says_which_aggregator_makes_a_selector_unbiased(fedcohort):
    _, out, _ = fedcohort("list", "selectors", "gradnorm")
    assert "unbiased with the aggregator: inverse-probability" in out
    _, out, _ = fedcohort("list", "--format", "json")
    paired = {e["name"]: e["aggregator"] for e in json.loads(out) if "aggregator" in e}
    assert paired == {
        "clustered": "fedavg",
        "delta": "inverse-probability",
        "divfl": "mean",
        "feel": "inverse-probability",
        "gradnorm": "inverse-probability",
        "size-weighted": "mean",
    }
