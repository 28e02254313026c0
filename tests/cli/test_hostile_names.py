"""Names that clients chose are shown as they are and never interpreted, wherever text leaves the library."""

from __future__ import annotations

import io
import logging
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedcohort import cli
from fedcohort.cli.app import app
from fedcohort.cli.output import print_error, table
from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import InputError
from fedcohort.core.protocol import SELECTORS, RoundReport, RoundRequest
from fedcohort.core.terminal import Terminal, say
from fedcohort.core.text import OneLine, escape_html, escape_label, printable
from fedcohort.report.exposition import exposition
from fedcohort.session import Session
from fedcohort.session.rules import Rules

HOSTILE = [
    "site[a]", "site[b]", "[/x]", "[/]", "[bold]x[/bold]", "[link=https://example.org]x[/link]", ":smile:", "\\[a]",
    "a\x1b[2Jb", "a\x1b]0;title\x07", "a\x9b31mb", "two\nlines", "back\rwards", "\u202egnp", "a\u200bb", "a\u2028b",
    "\ud800", "tab\there", "<b>", 'q"uote', "\x00", "\x7f", "é", "東京", "\u00a0",
]  # fmt: skip
STEERING = {c for c in map(chr, range(0x20)) if c not in "\n\t"} | {"\x7f", "\x9b", "\u202e", "\u2028", "\u200b"}


def short_repr(*print_it):
    console = Terminal(file=io.StringIO(), width=200, force_terminal=True, color_system=None)
    for do in print_it:
        do(console)
    return console.file.getvalue()


def test_every_name_is_printed_and_no_two_look_the_same():
    lines = [short_repr(lambda console, name=name: say(console, f"client {name} was picked")) for name in HOSTILE]
    assert len(set(lines)) == len(HOSTILE)
    for line in lines:
        assert line.count("\n") == 1 and not STEERING & set(line)
    assert "site[a]" in lines[0] and "[/x]" in lines[2] and "東京" in lines[-2]


def test_tables_titles_and_texts_print_names_as_they_are():
    rows = [[i, name] for i, name in enumerate(HOSTILE)]
    text = short_repr(lambda console: console.print(table(["#n", "client"], rows, title="[/x] \x1b[2J")))
    assert not STEERING & set(text) and "site[a]" in text and "site[b]" in text and "[/x]" in text
    assert not STEERING & set(short_repr(lambda console: console.print("raw \x1b[2J [/x]")))


def test_an_error_that_quotes_a_name_is_printed(capsys):
    for name in HOSTILE:
        print_error(InputError(f"There is no client {name}.", hint=f"did you mean {name}?"))
        assert not STEERING & set(capsys.readouterr().err)


def test_commands_print_only_through_the_terminal():
    for path in sorted(Path(cli.__file__).parent.glob("*.py")):
        text = path.read_text()
        assert "Console(" not in text.replace("class Terminal(Console)", ""), path.name
        assert not re.search(r"markup=True|\[/\]|\.print\(f", text), path.name


def test_printable_keeps_ordinary_text():
    for name in ("anna", "Zoë", "東京 3", "a\u00a0b", "naïve [1]"):
        assert printable(name) == name
    assert printable("a\nb") == "a\\x0ab" and printable("a\nb", lines=True) == "a\nb"
    assert escape_html("<i>\x1b") == "&lt;i&gt;\\x1b" and escape_label('a"\\\n') == 'a\\"\\\\\\\\x0a'


@pytest.fixture(scope="module")
def journal(tmp_path_factory):
    path = tmp_path_factory.mktemp("hostile") / "run.sqlite"
    names = [name for name in HOSTILE if name != "\ud800"]  # nobody can write a lone surrogate to a file
    rules = Rules(blocked=("[/x]",))
    with Session(SELECTORS.create("size-weighted"), ClientTable(names=names, sizes=range(1, len(names) + 1)),
                 journal=path, rules=rules) as session:  # fmt: skip
        for _ in range(4):
            cohort = session.ask(RoundRequest(12))
            session.tell(RoundReport(cohort.ticket, cohort.clients))
    return path, names


def test_commands_show_hostile_names(journal):
    path, names = journal
    calls = [["explain", str(path), "--round", "1"], ["journal", "rules", "prove", str(path)]]
    calls += [["explain", str(path), "--client", name] for name in names]
    calls += [["explain", str(path), "--round", "1", "--client", name] for name in names]
    for call in calls:
        result = CliRunner().invoke(app, call)
        assert result.exit_code == 0, (call, result.output)
        assert not STEERING & set(result.output), call
    assert "[/x]" in CliRunner().invoke(app, ["explain", str(path), "--client", "[/x]"]).output


def test_prometheus_labels_stay_on_one_line(journal):
    path, _ = journal
    text = exposition(dict.fromkeys(HOSTILE, path))
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(line.startswith("fedcohort_") for line in samples) and not STEERING & set(text)
    assert sum(line.startswith("fedcohort_rounds_total{") for line in samples) == len(HOSTILE)


def test_log_messages_stay_on_one_line():
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(OneLine())
    log = logging.Logger("names")
    log.addHandler(handler)
    for name in HOSTILE[:-3]:
        log.warning(
            "joined: %s", name.encode("utf-8", "surrogateescape" if "\ud800" not in name else "replace").decode()
        )
    assert len(stream.getvalue().splitlines()) == len(HOSTILE[:-3]) and not STEERING & set(stream.getvalue())


def test_many_calls_in_one_process_add_one_filter():
    for _ in range(3):
        assert CliRunner().invoke(app, ["list", "selectors"]).exit_code == 0
    for handler in logging.getLogger().handlers:
        assert sum(isinstance(each, OneLine) for each in handler.filters) == 1


def test_flowers_log_messages_stay_on_one_line(caplog):
    pytest.importorskip("flwr")
    from fedcohort.core.text import shorten
    from fedcohort.hosts.flower.exchange import log

    with caplog.at_level("INFO", logger="flwr.fedcohort"):
        log.propagate, before = True, log.propagate
        log.info("\t> %s: %s", "a\x1b[2J\nb", "c")
        log.propagate = before
    for record in caplog.records:
        assert not STEERING & set(record.getMessage()) and "\n" not in record.getMessage()
    assert "\x1b" not in shorten("a\x1b[2J")
