"""``fedcohort twin`` and ``fedcohort advise``: a twin of a recorded federation, and what to change in it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedcohort.cli import options
from fedcohort.cli.output import Format, out, print_json, print_tables
from fedcohort.core.files import write_file
from fedcohort.core.terminal import err, say

DataOption = Annotated[
    str | None, typer.Option("--data", help="A dataset or file like the clients' data; default: digits.")
]
ModelOption = Annotated[str | None, typer.Option("--model", help="The model, as in a configuration; default: mlp.")]
WorkOption = Annotated[
    Path | None, typer.Option("--work", help="Folder of the twins' runs; default: JOURNAL.advice.", file_okay=False)
]


def _prepared(
    journal: Path, name: str | None, data: str | None, model: str | None, work: Path | None, quiet: bool
) -> Any:
    """Read and fit the journal, and calibrate the twins."""
    from fedcohort.advice import drift, record
    from fedcohort.advice.fit import Fit
    from fedcohort.advice.twin import Stand, calibrate, played, twin
    from fedcohort.report.why import find_journal

    path = find_journal(journal, name)
    console = err(quiet)
    found = record.read_record(path)
    fit = Fit(found)
    changes = drift.changes(found)
    folder = path.with_suffix(".advice") if work is None else work
    say(console, f"{found.models} rounds, {len(found.names)} clients; results in {folder}")
    stand = Stand.of(data)
    what = f"{data or 'digits'} and the model {model or 'mlp'}"
    fit.assumed.append(f"The data are {what}, in place of the clients' own (--data, --model).")
    say(console, "calibrating how hard learning is")
    learning = calibrate(fit, stand, model, folder)
    table = twin(fit, stand, learning, model)
    one = played(table, folder / "twin")
    return fit, changes, folder, stand, learning, table, one


def twin(
    journal: options.RunArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="The configuration to write.", dir_okay=False)] = Path(
        "twin.toml"
    ),
    page: Annotated[
        Path | None, typer.Option("--page", help="Also draw the record beside the twin, as HTML.", dir_okay=False)
    ] = None,
    name: options.RunOption = None,
    data: DataOption = None,
    model: ModelOption = None,
    work: WorkOption = None,
    quiet: options.QuietOption = False,
    format: options.FormatOption = Format.TABLE,
) -> None:
    """Fit a scenario to a journal: a configuration whose simulated clients behave like the recorded ones.

    It prints what is fitted and what is assumed. `fedcohort run` plays the twin, and `fedcohort advise` plays many.

    For example:

    - fedcohort twin run.sqlite -o twin.toml --page twin.html
    - fedcohort run twin.toml
    """
    from fedcohort.advice.page import sentences, twin_page
    from fedcohort.simulate.config.toml import to_toml

    fit, changes, _, _, learning, table, one = _prepared(journal, name, data, model, work, quiet)
    texts = sentences(fit, learning, changes)
    comments = [f"# {heading}: {line}\n" for heading, lines in texts.items() for line in lines]
    write_file(output.resolve(), ("".join(comments) + "\n" + to_toml(table)).encode())
    if page is not None:
        write_file(page.resolve(), twin_page(fit, learning, one, changes).encode())
    if format is Format.JSON:
        print_json({"twin": str(output), "learns_alike": learning.fits, **texts})
        return
    _print(texts)
    say(out(), str(output))


def advise(
    journal: options.RunArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.", dir_okay=False)] = Path(
        "advice.html"
    ),
    twins: Annotated[int, typer.Option("--twins", min=4, max=200, help="How many twins to draw.")] = 16,
    name: options.RunOption = None,
    data: DataOption = None,
    model: ModelOption = None,
    work: WorkOption = None,
    quiet: options.QuietOption = False,
    format: options.FormatOption = Format.TABLE,
) -> None:
    """Say which selector, how many clients, which deadline, and rounds or not, for the federation of a journal.

    Many twins of the federation are drawn and run in several ways. The answer has an interval that includes what the
    journal does not tell; or it is that this journal cannot tell, and what to record. It takes minutes. Interrupt it
    at any time: the same command continues.

    For example:

    - fedcohort advise run.sqlite
    - fedcohort advise run.sqlite --data people.csv --twins 32 -o advice.html
    """
    from fedcohort.advice import trial
    from fedcohort.advice.page import advice_page, answer, sentences
    from fedcohort.advice.page import table as ways_table

    fit, changes, folder, stand, learning, _, one = _prepared(journal, name, data, model, work, quiet)
    console = err(quiet)
    outcomes = trial.play(fit, stand, learning, model, folder, twins, lambda text: say(console, text))
    verdict = trial.judge(fit, learning, outcomes, [str(change) for change in changes if change.found])
    write_file(output.resolve(), advice_page(fit, learning, one, changes, outcomes, verdict).encode())
    if format is Format.JSON:
        rows = [
            {"way": o.way.name, "how": o.way.how, "times_as_fast": o.interval()[0], "interval": o.interval()[1:]}
            for o in outcomes
        ]
        best = None if verdict.best is None else verdict.best.way.name
        shadows = list(fit.record.shadows)
        print_json(
            {"advice": best, "headline": verdict.headline, "record": verdict.missing, "ways": rows, "shadows": shadows}
        )
        return
    for line in answer(verdict, fit):
        say(out(), line)
    print_tables([ways_table(fit, outcomes)], out())
    _print(sentences(fit, learning, changes))
    say(out(), str(output))


def _print(texts: dict[str, list[str]]) -> None:
    console = out()
    for heading, lines in texts.items():
        say(console, heading, style="bold")
        for line in lines:
            say(console, f"  {line}")
