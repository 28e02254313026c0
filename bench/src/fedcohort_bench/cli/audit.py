"""``fedcohort privacy-audit``: what a federation reveals about its clients' labels."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedcohort.cli import options
from fedcohort.cli.analytics import configuration
from fedcohort.cli.output import Format, out, print_json, table
from fedcohort.core.errors import InputError
from fedcohort.core.files import read_file
from fedcohort.core.terminal import err, say
from fedcohort.core.text import short_repr

if TYPE_CHECKING:
    pass


def audit(
    config: options.BaseArgument = None,
    data: options.DataOption = None,
    folder: options.FolderOption = None,
    scenario: options.ScenarioOption = None,
    counts: Annotated[
        Path | None,
        typer.Option(
            "--counts", help="Your own CSV file: a client's name and its label counts on each line.", dir_okay=False
        ),
    ] = None,
    epsilon: Annotated[
        list[float] | None, typer.Option("--epsilon", help="Privacy budget of noisy counts; may be repeated.")
    ] = None,
    coalition: Annotated[int, typer.Option("--coalition", min=1, help="Clients that collude with the server.")] = 1,
    clients: Annotated[bool, typer.Option("--clients", help="Also print a table with one row per client.")] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the attacks' random numbers.")] = 0,
    set_: options.SetOption = None,
    device: options.DeviceOption = None,
    quiet: options.QuietOption = False,
    format: options.FormatOption = Format.TABLE,
) -> None:
    """Attack every way of sharing labels and report what each attacker learns.

    The attackers are an honest-but-curious server, a key holder and a coalition of clients. For each way of sharing,
    the report says who finds whose label counts, and how well. Errors are total variation distances between true and
    inferred label shares, from 0 (known) to 1.

    For example:

    - fedcohort privacy-audit --data digits
    - fedcohort privacy-audit --counts hospitals.csv --epsilon 1
    """
    import numpy as np

    from fedcohort_bench.privacy.meter import attack_all

    budgets = epsilon or [1.0]
    rng = np.random.default_rng(seed)
    if counts is not None:
        names, matrix = _read_counts(counts)
        result = attack_all(matrix, names=names, epsilons=budgets, coalition=coalition, rng=rng)
    else:
        from fedcohort_bench.privacy.exposure import measure_exposure

        settings = configuration(config, set_, data=data, folder=folder, scenario=scenario)
        say(err(quiet or format is Format.JSON), "training every client once ...")
        exposure = measure_exposure(settings, device)
        result = attack_all(
            exposure.counts,
            names=exposure.names,
            epsilons=budgets,
            coalition=coalition,
            updates=exposure.updates,
            step=exposure.step,
            rng=rng,
        )
    if format is Format.JSON:
        ways = [
            {
                "option": e.option,
                "verdict": e.verdict,
                "findings": [
                    {
                        "observer": f.observer,
                        "attack": f.attack,
                        "mean_error": f.mean_error,
                        "counts_found": f.exact_share,
                        "classes_named": f.named,
                        "error": f.error,
                        "exact": f.exact,
                    }
                    for f in e.findings
                ],
            }
            for e in result.exposures
        ]
        print_json({"clients": result.names, "ignorance": result.ignorance, "options": ways})
        return
    rows = [
        [
            e.option if i == 0 else "",
            f.observer,
            f.attack,
            f"{f.mean_error:.3f}",
            f"{f.exact_share:.0%}",
            "named" if f.named else "not named",
        ]
        for e in result.exposures
        for i, f in enumerate(e.findings)
    ]
    columns = ["option", "attacker", "attack", "#mean error", "#counts found", "classes"]
    known = f"error when only the federation's label shares are known: {result.ignorance.mean():.3f}"
    out().print(table(columns, rows, title=f"{len(result.names)} clients; {known}"))
    for e in result.exposures:
        say(out(), f": {e.verdict}", lead=e.option)
    if clients:
        first = [e.findings[0] for e in result.exposures]
        lines = [
            [name, f"{result.ignorance[i]:.3f}", *("exact" if f.exact[i] else f"{f.error[i]:.3f}" for f in first)]
            for i, name in enumerate(result.names)
        ]
        heads = ["client", "#no attack", *(f"#{e.option}" for e in result.exposures)]
        out().print(table(heads, lines, title="the server's error for each client"))


def _read_counts(path: Path) -> tuple[list[str], list[list[int]]]:
    try:
        lines = list(csv.reader(read_file(path).decode().splitlines()))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = error.strerror if isinstance(error, OSError) else f"it is not a text table: {error}"
        raise InputError(f"The label counts in {path} cannot be read: {why}.") from error
    names, rows = [], []
    for number, line in enumerate(lines, start=1):
        try:
            if line:
                rows.append([int(cell) for cell in line[1:]])
                names.append(line[0])
        except ValueError:
            if number > 1:  # the first line may hold titles
                named = f"Line {number} of {path}"
                raise InputError(f"{named} must be a name and whole numbers. Got {short_repr(line)}.") from None
    if len(rows) < 2 or len({len(row) for row in rows}) != 1 or len(rows[0]) < 2:
        raise InputError(f"{path} must have at least two clients, all with the same number of counts, at least two.")
    return names, rows
