"""Commands answer nonsense with a sentence and an exit code, never with a traceback."""

import inspect
import os
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest
import typer

from fedcohort.cli.app import app, main
from fedcohort.core.errors import FedcohortError
from fedcohort.simulate.config.toml import to_toml
from tests.experiments import run_experiment

HUGE, DIGITS, LONG = "1" + "0" * 22, "9" * 5000, "n" * 300
TABLE = {
    "data": {"name": "synthetic", "samples": 120, "test_samples": 40, "classes": 3, "shape": [4]},
    "scenario": {"partition": {"name": "shards", "clients": 6, "per_client": 2}},
    "model": {"name": "logistic"},
    "local": {"batch_size": 8, "steps": 1, "lr": 0.1},
    "run": {"rounds": 1, "cohort": 2, "workers": 1, "device": "cpu"},
    "selectors": {"uniform": {}},
}
JOURNAL = "x/journal/uniform-s0.sqlite"
NUMBERS = [HUGE, f"-{HUGE}", DIGITS, "-1", "nan", "inf", "-inf", "1e400", "", "²"]
PATHS = [
    LONG, f"dir/{LONG}", "n" * 5000, "dir", "empty", "garbage", "fifo", "deep.toml", "dotted.toml", "deep.json",
    "cut.npz", "cut.sqlite", "c.toml/x", "/dev/null", "/proc/x", "/proc/self/mem", "/sys/x/y", "a\nb", "\udcff", "",
]  # fmt: skip
NAMES = [f"{LONG}.py:X", "garbage:X", "dir:X", "empty:X", "a,,b", "=", ",", "../x"]
DEEP = "[" * 5000 + "]" * 5000
CHANGES = [
    f"seeds=[{HUGE}]", f"seeds={HUGE}", "seeds=[-1]", "seeds=[0, 0]", f"run.rounds={HUGE}", "run.rounds=1979-05-27",
    "run=1", f"run.cohort={HUGE}", f"run.workers={HUGE}", "run.targets=[nan]", f"data.samples={HUGE}",
    f"data.classes={HUGE}", f"scenario.partition.clients={HUGE}", f"local.batch_size={HUGE}", f"local.steps={HUGE}",
    "local.lr=inf",
    f"a={DEEP}", f"a{'.a' * 3000}=1", f"a={DIGITS}", f"selectors.{LONG}=uniform", f'settings=[{{name="{LONG}"}}]',
    f"model.name={LONG}", 'selectors."\udcff"=uniform', "=", "",
]  # fmt: skip
SWEEPS = [
    "fedcor.warmup=",
    f"fedcor.warmup={HUGE}",
    f"fedcor.warmup={DEEP}",
    f"fedcor.{LONG}=1",
    f"{LONG}.x=1",
    "=",
    "",
]
# The other arguments of a command. Commands that would compute for long stop at something that does not exist.
SOUND = {
    "run": ["no-such.toml"],
    "compare": ["no-such.toml"],
    "twin": ["no-such.sqlite"],
    "advise": ["no-such.sqlite"],
    "extend": ["x"],
    "report": ["no-such"],
    "explain": [JOURNAL],
    "journal audit": [JOURNAL],
    "journal rules prove": [JOURNAL],
    "analytics": ["no-such.toml"],
    "diagnose": ["no-such.toml"],
    "check": ["no-such"],
    "bench": ["--data", "no-such"],
    "reproduce": ["no-such"],
    "demo": ["--seeds", "no-such"],
    "dashboard": ["no-such", "--token", "short"],
    "flower new": ["garbage"],
    "privacy-audit": ["--counts", "garbage"],
    "privacy keyholder serve": ["no-such"],
}


def commands(group, path=()):
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        command = command.load() if hasattr(command, "load") else command  # of another package
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


WHOLE = typer.main.get_command(app)  # once, where the program builds it in every call
COMMANDS = dict(commands(WHOLE))


def nonsense(parameter, kind):
    """Return a value for a parameter, by its name and types."""
    if parameter.name == "set_":
        return CHANGES
    if parameter.name == "sweep":
        return SWEEPS
    if {int, float} & kind:
        return NUMBERS
    return PATHS if Path in kind else [LONG, *NAMES, *NUMBERS, "\udcff"]


def types(hint):
    """Return the types in an annotation: list, Path and None in ``list[Path] | None``."""
    return {hint}.union(*map(types, get_args(hint)))


def given(name, command):
    """Yield command lines with one parameter that makes no sense."""
    places = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    valid = SOUND.get(name, [JOURNAL] * sum(place.required for place in places))
    hints = get_type_hints(inspect.unwrap(command.callback))
    for parameter in command.params:
        kind = types(hints.get(parameter.name))
        if parameter.param_type_name == "argument":
            at = places.index(parameter)
            for value in nonsense(parameter, kind):
                yield [*name.split(), *valid[:at], value, *valid[at + 1 :]]
        elif not parameter.is_flag and parameter.name != "help":
            for value in nonsense(parameter, kind):
                yield [*name.split(), *valid, parameter.opts[0], value]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nonsense")
    run_experiment(TABLE, folder / "x")
    (folder / "c.toml").write_text(to_toml(TABLE))
    (folder / "dir").mkdir()
    (folder / "empty").write_text("")
    (folder / "garbage").write_bytes(bytes(range(256)) * 20)
    (folder / "deep.toml").write_text(f"a = {DEEP}")
    (folder / "dotted.toml").write_text(f"a{'.a' * 5000} = 1")
    (folder / "deep.json").write_text(DEEP)
    os.mkfifo(folder / "fifo")
    np.savez(folder / "cut.npz", x_train=np.zeros((9, 2)), y_train=np.arange(9) % 3)
    (folder / "cut.npz").write_bytes((folder / "cut.npz").read_bytes()[:400])
    (folder / "cut.sqlite").write_bytes((folder / JOURNAL).read_bytes()[:3000])
    return folder


@pytest.fixture
def answer(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    monkeypatch.setattr("fedcohort.cli.app.app", WHOLE)

    def call(arguments):
        monkeypatch.setattr(sys, "argv", ["fedcohort", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        assert ended.value.code in (0, 1, 2, 3), (arguments, said.err)
        assert ended.value.code in (0, 3) or said.err.strip() or said.out.strip(), arguments
        assert "Traceback" not in said.err, arguments
        return ended.value.code, said

    return call


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "privacy keyholder serve"])
def test_a_command_answers_nonsense_with_a_sentence(name, answer):
    cases = list(given(name, COMMANDS[name]))
    assert cases
    for arguments in cases:
        answer(arguments)


@pytest.mark.parametrize("change", CHANGES)
def test_a_nonsensical_change_of_a_configuration_is_refused(change, answer):
    code, said = answer(["run", "c.toml", "-o", "new", "-q", "--set", change])
    assert code == 1 and said.err.startswith("error: ")
    assert not os.path.exists("new/meta.json")


@pytest.mark.parametrize("file", ["deep.toml", "dotted.toml", "garbage", "empty/x", "fifo", "dir"])
def test_a_file_that_is_not_a_configuration_is_refused(file, answer):
    assert answer(["run", file])[0] == 1


@pytest.mark.parametrize("file", ["cut.npz", "garbage.npz", "garbage.parquet", "dir"])
def test_truncated_data_are_refused(file, answer, place):
    for suffix in ("npz", "parquet"):
        (place / f"garbage.{suffix}").write_bytes(b"PK\x03\x04" + bytes(range(256)))
    code, said = answer(["compare", "--data", file, "--selectors", "uniform", "--seeds", "1", "--rounds", "1", "-q"])
    assert code == 1 and file in said.err


@pytest.mark.parametrize("file", [LONG, f"dir/{LONG}", "dir", "fifo", "/proc/x", "c.toml/x", ""])
def test_a_report_that_cannot_be_written_is_refused(file, answer):
    assert answer(["report", "x", "-q", "-o", file])[0] == 1


@pytest.mark.parametrize("command", [["analytics"], ["diagnose"], ["privacy-audit"]])
@pytest.mark.parametrize("change", ["run=1", f"seeds=[{HUGE}]", "data=1", "scenario=1"])
def test_studies_of_a_federation_refuse_such_changes_too(command, change, answer):
    assert answer([*command, "c.toml", "-q", "--set", change])[0] == 1


def test_the_number_of_seeds_is_limited(answer):
    assert answer(["extend", "x", "-q", "--seeds", HUGE])[0] == 1


def test_the_largest_seed_works(place, answer):
    code, _ = answer(["run", "c.toml", "-o", "greatest", "-q", "--set", f"seeds=[{2**63 - 1}]"])
    assert code == 0


def test_a_bug_still_looks_like_one(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fedcohort", "list"])

    def broken(*arguments, **options):
        raise ValueError("a mistake of ours")

    monkeypatch.setattr("fedcohort.cli.app.app", broken)
    with pytest.raises(ValueError, match="a mistake of ours"):
        main()
    monkeypatch.setattr("fedcohort.cli.app.app", lambda **_: (_ for _ in ()).throw(OSError("no file is named")))
    with pytest.raises(OSError, match="no file is named"):
        main()


def test_debug_shows_the_traceback_of_a_system_error(place, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["fedcohort", "--debug", "explain", LONG])
    with pytest.raises((OSError, FedcohortError)):
        main()
