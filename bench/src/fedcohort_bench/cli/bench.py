"""``fedcohort bench``: every selector on every kind of federation, scored against uniform."""

from __future__ import annotations

import math
import time
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated

import typer

from fedcohort.cli import options
from fedcohort.cli.experiment import INTERRUPTED, command_line
from fedcohort.cli.output import Format, out, print_json, print_tables
from fedcohort.core.terminal import err, say

if TYPE_CHECKING:
    from rich.console import Console

    from fedcohort_bench.benchmark.scores import Scores
    from fedcohort_bench.benchmark.timed_scores import TimeScores

_QUICK = "A trial with --quick: one seed, 20 rounds. It shows that everything runs; no number here is a result."


def bench(
    data: Annotated[
        str,
        typer.Option(
            help="digits, fashion-mnist, cifar10; with real owners: watch, flights, birdstrikes, speeches, stdlib, "
            "femnist; or your own .csv, .parquet, .npz or folder."
        ),
    ] = "digits",
    label: options.LabelOption = None,
    client: options.ClientOption = None,
    suite: Annotated[
        str | None,
        typer.Option(
            help="'natural': all datasets with real owners, each in its own folder; 'time': rounds and "
            "asynchronous runs in simulated time, on digits or fashion-mnist."
        ),
    ] = None,
    selectors: Annotated[
        str | None,
        typer.Option(
            help="Names or file.py:Class, separated by commas; default: every selector.",
            autocompletion=options.complete_selectors,
        ),
    ] = None,
    seeds: Annotated[
        str, typer.Option(help="'report' (to publish results), 'tuning' (to choose parameters), or a list such as 1,2.")
    ] = "report",
    settings: Annotated[
        str | None,
        typer.Option(help="Only these settings, separated by commas; with --suite time, these kinds of availability."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Check that everything runs: one seed, 20 rounds, no usable result.")
    ] = False,
    folder: Annotated[str | None, typer.Option("--folder", help="Where the datasets are.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue the benchmark in this directory.")] = None,
    submit: Annotated[
        Path | None,
        typer.Option(help="Check a benchmark's directory and copy its two files, NAME.toml and NAME.json, to --out."),
    ] = None,
    merge: Annotated[
        list[Path] | None,
        typer.Option(help="Only score this finished benchmark and others of other settings together; repeat it."),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Stop cleanly after this many minutes; it can be continued.")
    ] = None,
    baseline: options.BaselineOption = None,
    out_dir: options.OutOption = None,
    device: options.DeviceOption = None,
    processes: options.ProcessesOption = None,
    quiet: options.QuietOption = False,
    format: options.FormatOption = Format.TABLE,
) -> None:
    """Run the benchmark: every selector on every kind of federation.

    Writes bench.html and bench.json next to the results. Choose parameters on the tuning seeds and report results on
    the report seeds; a result states which seeds it used. The command first writes frozen.json. If a selector changes
    after that, the benchmark can neither be continued nor merged with others. --merge writes to the first folder.

    For example:

    - fedcohort bench --quick
    - fedcohort bench --data fashion-mnist --selectors balanced,fedcbs,mine.py:Mine
    """
    from fedcohort.simulate.config.selectors import selector_entries
    from fedcohort.simulate.runner import default_out
    from fedcohort_bench.benchmark import run
    from fedcohort_bench.launch import Launcher

    console = err(quiet)
    if submit is not None:
        _submit(submit, out_dir or Path("submission"))
        return
    if merge:
        _show(run.write_scores(*merge, baseline=baseline), merge[0], console, quick, format, "")
        return
    launcher = Launcher(
        device=device,
        processes=processes,
        command=command_line(),
        console=console,
        until=math.inf if minutes is None else time.monotonic() + 60 * minutes,
    )
    if resume is not None:
        command = f"fedcohort bench --resume {resume}"
        _show(run.resume_dataset(resume, launcher), resume, console, quick, format, command)
        return
    chosen = options.split_names(selectors, "--selectors") if selectors else run.every_selector()
    entries = selector_entries([name for name in chosen if name != "uniform"])
    only = options.split_names(settings, "--settings") if settings else ()
    if suite == run.TIME:
        if baseline is not None:
            raise typer.BadParameter("the suite 'time' compares with uniform selection in rounds; leave out --baseline")
        target = out_dir or default_out("bench-time")
        pieces = run.plan_time(data, entries, _seeds(seeds), regimes=only, quick=quick, folder=folder)
        command = f"the same command with --out {target}"
        _show(run.run_time(pieces, target, launcher), target, console, quick, format, command)
        return
    columns = {key: value for key, value in (("label", label), ("client", client)) if value is not None}
    for name, target in _targets(data, suite, out_dir).items():
        config, notes = run.plan(
            name, entries, _seeds(seeds), settings=only, quick=quick, folder=folder, columns=columns, baseline=baseline
        )
        for note in notes:
            say(console, f"note: {note}")
        command = f"fedcohort bench --resume {target}"
        if suite is not None:
            command = f"the same command with --out {target.parent}"
        _show(run.run_dataset(config, target, launcher), target, console, quick, format, command)


def _targets(data: str, suite: str | None, out_dir: Path | None) -> dict[str, Path]:
    """Return the datasets to run, each with the folder for its results."""
    from fedcohort.simulate.runner import default_out
    from fedcohort_bench.benchmark.run import TIME
    from fedcohort_bench.benchmark.suite import SUITES

    if suite is None:
        return {data: out_dir or default_out(f"bench-{PurePath(data).stem}")}
    if suite not in SUITES:
        raise typer.BadParameter(f"There is no suite {suite!r}. Known: {', '.join((*SUITES, TIME))}.")
    folder = out_dir or default_out(f"bench-{suite}")
    return {name: folder / name for name in SUITES[suite]}


def _show(
    scores: Scores | TimeScores | None, folder: Path, console: Console, quick: bool, format: Format, command: str
) -> None:
    """Print the scores of a benchmark; None means that it was interrupted, and ``command`` continues it."""
    from fedcohort_bench.benchmark.page import matrix, minorities, robustness
    from fedcohort_bench.benchmark.scores import Scores
    from fedcohort_bench.benchmark.timed_page import selection, ways

    if scores is None:
        say(console, f"stopped; continue with: {command}")
        raise typer.Exit(INTERRUPTED)
    lines: list[str] = []
    if isinstance(scores, Scores):
        if scores.left_out:
            say(console, f"note: not in every setting, and so left out: {', '.join(scores.left_out)}")
        tables = [matrix(scores), minorities(scores), robustness(scores)]
        lines = [f"{line.label}: {line.sentence}" for line in scores.lines if not quick]
    else:
        tables = [ways(scores), selection(scores)]
    if format is Format.JSON:
        print_json({"out": str(folder), **scores.to_dict()})
    else:
        if quick:
            say(out(), _QUICK)
        print_tables(tables, out())
    say(console, f"page: {folder / 'bench.html'}")
    for line in lines if format is Format.TABLE else ():
        say(out(), line)


def _submit(folder: Path, target: Path) -> None:
    from fedcohort.simulate.store.writer import write_atomically
    from fedcohort_bench.benchmark.submission import check_submission

    config, scores = folder / "config.toml", folder / "bench.json"
    submission = check_submission(config, scores)
    selectors = submission["selectors"]
    best = max(selectors, key=lambda entry: entry["mean_gain"])
    stem = f"{submission['data']}-{'-'.join(map(str, submission['seeds']))}-{len(selectors)}-selectors"
    target.mkdir(parents=True, exist_ok=True)
    for source, suffix in ((config, ".toml"), (scores, ".json")):
        write_atomically(target / f"{stem}{suffix}", source.read_bytes())
    say(out(), f"{target / stem}.toml and .json: best mean gain {best['mean_gain']:+.2f} ({best['label']})")


def _seeds(text: str) -> list[int]:
    """Return the seeds that "report", "tuning" or a list of numbers stands for."""
    from fedcohort_bench.benchmark.suite import REPORT_SEEDS, TUNING_SEEDS

    named = {"report": REPORT_SEEDS, "tuning": TUNING_SEEDS}
    try:
        return [*named[text]] if text in named else [int(item) for item in text.split(",")]
    except ValueError:
        choices = "'report', 'tuning', or a list such as 1,2"
        raise typer.BadParameter(f"Seeds must be {choices}. Got {text!r}.") from None
