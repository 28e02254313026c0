"""``fedcohort analytics``: rank a federation's clients by skewness, with confidence."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedcohort.cli import options
from fedcohort.cli.output import Format, out, print_json, rounds_bar, table
from fedcohort.core.errors import InputError
from fedcohort.core.terminal import err, say

if TYPE_CHECKING:
    from fedcohort.core.arrays import AnyArray, FloatArray
    from fedcohort.selectors.papers.fedacs import Ranking


def _from_journal(path: Path, level: float) -> tuple[Ranking, list[str]]:
    """Rank clients from the journal of a session whose selector can rank."""
    from fedcohort.core.selector_spec import class_of
    from fedcohort.journal import read_journal
    from fedcohort.selectors.papers.fedacs import FedAcs, FedAcsState, ranking

    with contextlib.closing(read_journal(path)) as journal:
        spec = journal.meta()["selector"]
        cls = class_of(spec)  # never imports: a journal may come from somebody else
        if cls is None and spec.get("reference") is not None:
            raise InputError(
                f"The journal {path} belongs to the selector {spec['reference']}. Code is not imported just because a "
                "journal names it.",
                hint=f"if you trust it: --selector {spec['reference']}",
            )
        if cls is None or not issubclass(cls, FedAcs):
            raise InputError(
                f"The journal {path} belongs to {spec['name'] or spec['class']!r}, which cannot rank clients.",
                hint="use the journal of a session with fedacs",
            )
        clients, _ = journal.table()
        return ranking(FedAcsState(**journal.state("")), level), list(clients.names)


def _rows(ranking: Ranking, names: list[str], truth: FloatArray | None) -> list[dict[str, Any]]:
    columns: dict[str, AnyArray] = {"win_rate": ranking.win_rate, "low": ranking.low, "high": ranking.high}
    columns |= {"best_rank": ranking.best_rank, "worst_rank": ranking.worst_rank, "rounds": ranking.rounds.astype(int)}
    columns |= {} if truth is None else {"true_skewness": truth}
    return [
        {"rank": place, "client": names[client], **{name: values[client].item() for name, values in columns.items()}}
        for place, client in enumerate(ranking.order.tolist(), start=1)
    ]


def analytics(
    config: options.BaseArgument = None,
    data: options.DataOption = None,
    folder: options.FolderOption = None,
    scenario: options.ScenarioOption = None,
    cohort: Annotated[int | None, typer.Option("--cohort", min=2, help="Clients per round.")] = None,
    rounds: Annotated[
        int | None, typer.Option("--rounds", min=1, help="Rounds; default: enough for 20 duels per client on average.")
    ] = None,
    level: Annotated[
        float, typer.Option("--level", min=0.5, max=0.999, help="Level of the credible intervals.")
    ] = 0.95,
    show: Annotated[int, typer.Option("--show", min=0, help="Rows at each end of the table; 0 shows all.")] = 10,
    journal: Annotated[
        Path | None,
        typer.Option("--journal", help="Rank from a session's journal instead of a simulation.", dir_okay=False),
    ] = None,
    selector: options.TrustOption = None,
    set_: options.SetOption = None,
    device: options.DeviceOption = None,
    quiet: options.QuietOption = False,
    format: options.FormatOption = Format.TABLE,
) -> None:
    """Rank clients by how skewed their labels are (FedACS).

    In each round, some clients compute one gradient, and gradients far from the round's mean lose duels. Each client is
    shown with the range of ranks its credible interval allows. No model has to be fully trained.

    For example:

    - fedcohort analytics --scenario fedacs-high --data synthetic
    - fedcohort analytics --journal server.sqlite
    """
    console = err(quiet or format is Format.JSON)
    summary: dict[str, Any] = {"level": level}
    if journal is not None:
        options.import_selectors(selector)
        ranking, names = _from_journal(journal, level)
        rows = _rows(ranking, names, None)
    else:
        from fedcohort.simulate.analytics import rank_by_skewness

        settings = configuration(config, set_, data=data, folder=folder, scenario=scenario, cohort=cohort)
        with rounds_bar(console, "duels") as (start, advance):
            report = rank_by_skewness(
                settings, rounds=rounds, level=level, device=device, on_start=start, on_round=advance
            )
        rows = _rows(report.ranking, list(report.federation.names), report.true_skewness)
        summary |= {"rounds": report.rounds, "megabytes": report.megabytes, "agreement": report.agreement}
    if format is Format.JSON:
        print_json({**summary, "clients": rows})
        return
    _print(rows, level, show)
    if "agreement" in summary:
        say(
            console,
            f"{summary['rounds']} rounds, {summary['megabytes']:.3g} MB; rank correlation with the true skewness "
            f"{summary['agreement']:.2f}",
        )


def _print(rows: list[dict[str, Any]], level: float, show: int) -> None:
    """Print the ranking: ``show`` rows at each end, or all rows if it is 0."""
    columns = ["#rank", "client", "#duels won", f"{level:.0%} interval", "possible ranks", "#rounds"]
    columns += ["#true skewness"] if "true_skewness" in rows[0] else []
    cells = []
    for row in rows:
        ranks, interval = f"{row['best_rank']} to {row['worst_rank']}", f"{row['low']:.0%} to {row['high']:.0%}"
        cells.append([row["rank"], row["client"], f"{row['win_rate']:.0%}", interval, ranks, row["rounds"]])
        cells[-1] += [f"{row['true_skewness']:.3f}"] if "true_skewness" in row else []
    if show and len(cells) > 2 * show:
        cells = [*cells[:show], ["...", *[""] * (len(columns) - 1)], *cells[-show:]]
    out().print(table(columns, cells, title="clients from the least to the most skewed"))


def configuration(
    config: str | None,
    changes: list[str] | None,
    *,
    data: str | None,
    folder: str | None,
    scenario: str | None,
    cohort: int | None = None,
) -> dict[str, Any]:
    """Return the configuration with the command line's options applied; ``changes`` are those of ``--set``."""
    from fedcohort.simulate.config.toml import find_table, merge_tables, override

    changed: dict[str, Any] = {}
    if source := {key: value for key, value in (("name", data), ("folder", folder)) if value}:
        changed["data"] = source
    if scenario:
        changed["scenario"] = {"preset": scenario}
    if cohort:
        changed["run"] = {"cohort": cohort}
    return override(merge_tables(find_table("demo" if config is None else config), changed), changes or [])
