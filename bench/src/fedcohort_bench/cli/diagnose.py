"""``fedcohort diagnose``: whether a Gaussian process suits a federation (FedCor's Appendix D)."""

from __future__ import annotations

from typing import Annotated

import typer

from fedcohort.cli import options
from fedcohort.cli.analytics import configuration
from fedcohort.cli.output import Format, out, print_json, rounds_bar, table
from fedcohort.core.terminal import err, say


def diagnose(
    config: options.BaseArgument = None,
    data: options.DataOption = None,
    folder: options.FolderOption = None,
    scenario: options.ScenarioOption = None,
    cohort: Annotated[int | None, typer.Option("--cohort", min=1, help="Clients per round.")] = None,
    looks: Annotated[int, typer.Option("--looks", min=2, help="Number of checks during training.")] = 6,
    every: Annotated[int, typer.Option("--every", min=1, help="Rounds between two checks.")] = 10,
    samples: Annotated[int, typer.Option("--samples", min=20, help="Cohorts tried at each check; paper: 1000.")] = 200,
    set_: options.SetOption = None,
    device: options.DeviceOption = None,
    quiet: options.QuietOption = False,
    format: options.FormatOption = Format.TABLE,
) -> None:
    """Check FedCor's assumption that loss changes are Gaussian.

    This repeats the paper's Appendix D. While uniform cohorts train a model, many other cohorts are tried from it and
    discarded. Their loss changes along principal components are compared with a Gaussian, and their covariance with
    that of the previous check, to see whether it is stationary.

    Example: fedcohort diagnose --data digits --scenario fedcor-2spc
    """
    from fedcohort_bench import diagnose as study

    console = err(quiet or format is Format.JSON)
    settings = configuration(config, set_, data=data, folder=folder, scenario=scenario, cohort=cohort)
    with rounds_bar(console, "rounds") as (start, advance):
        diagnosis = study.diagnose(
            settings, looks=looks, every=every, samples=samples, device=device, on_start=start, on_round=advance
        )
    rows = [
        {
            "round": at,
            "explained": normal.explained.tolist(),
            "distance": normal.distance.tolist(),
            "skewness": normal.skewness.tolist(),
            "excess_kurtosis": normal.excess_kurtosis.tolist(),
            "p_value": normal.p_value.tolist(),
            "similarity": None if i == 0 else float(diagnosis.similarity[i - 1]),
        }
        for i, (at, normal) in enumerate(zip(diagnosis.rounds.tolist(), diagnosis.normality, strict=True))
    ]
    if format is Format.JSON:
        print_json({"samples": samples, "distance": diagnosis.distance, "verdict": diagnosis.verdict, "looks": rows})
        return
    cells = []
    for i, normal in enumerate(diagnosis.normality):
        shares = " ".join(f"{share:.0%}" for share in normal.explained[:3])
        distances = " ".join(f"{distance:.2f}" for distance in normal.distance[:3])
        similarity = "" if i == 0 else f"{diagnosis.similarity[i - 1]:.2f}"
        cells.append([int(diagnosis.rounds[i]), shares, distances, similarity])
    columns = ["#round", "variance of 3 components", "distance from a Gaussian", "#similarity to the previous check"]
    out().print(table(columns, cells, title="loss changes under uniform cohorts"))
    say(
        console,
        f"The distance is Kolmogorov's, 0 for a Gaussian; {samples} samples of a true Gaussian are nearly always below "
        f"{diagnosis.chance:.2f}. The similarity is the cosine between covariances, 1 if they are unchanged.",
    )
    say(out(), diagnosis.verdict, style="bold")
    say(console, "To see whether FedCor pays off, run fedcohort compare --selectors uniform,fedcor on the same data.")
