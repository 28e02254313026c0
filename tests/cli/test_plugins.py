"""Other installed packages add commands, and a broken one harms nobody."""

import importlib.metadata
import sys

import pytest

MODULE = '''
import typer

def greet(name: str, loud: bool = False) -> None:
    """Greet somebody."""
    print(f"hello {name}".upper() if loud else f"hello {name}")

group = typer.Typer()

@group.command()
def one() -> None:
    """The first."""
    print("first")

@group.command()
def two() -> None:
    """The second."""
    print("second")
'''
ENTRIES = """[fedcohort.commands]
greet = greeting_plugin:greet
many = greeting_plugin:group
broken = greeting_plugin:absent
compare = greeting_plugin:greet
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """An installed package, greeting 1.0, with four commands: a function, a group, a broken one, a taken name."""
    info = tmp_path / "greeting-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    (tmp_path / "greeting_plugin.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "greeting_plugin", raising=False)


def test_the_help_lists_them_and_imports_none(command, installed):
    done = command("--help")
    assert done.returncode == 0, done.stderr
    listed = done.stdout.split("Other installed packages")[1]
    assert all(name in listed for name in ("greet", "many", "broken", "A command of the package greeting."))
    assert "greeting_plugin" not in sys.modules


def test_functions_and_groups_run_like_our_own(command, installed):
    assert command("greet", "anna", "--loud").stdout == "HELLO ANNA\n"
    assert "Greet somebody." in command("greet", "-h").stdout
    assert command("many", "two").stdout == "second\n"
    assert command("greet").returncode == 2  # wrong usage
    assert "Compare selectors" in command("compare", "--help").stdout  # our own name is ours


def test_a_broken_one_is_named_and_the_others_go_on(command, installed):
    done = command("broken")
    assert done.returncode == 1
    assert "broken" in done.stderr and "greeting" in done.stderr and "absent" in done.stderr
    assert command("greet", "anna").returncode == 0


@pytest.mark.parametrize("name", ["bench", "reproduce", "diagnose", "privacy-audit"])
def test_commands_of_the_benchmark_package_say_what_to_install(command, monkeypatch, name):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    done = command(name, "--quick")
    assert done.returncode == 1
    assert "fedcohort-bench" in done.stderr and "pip install fedcohort-bench" in done.stderr
    assert command("--help").returncode == 0
