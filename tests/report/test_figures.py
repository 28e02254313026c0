"""The numbers in the figures, and the sentences with them."""

from __future__ import annotations

import base64
import dataclasses
import json

import numpy as np
import pytest

from fedcohort.core.plots import Points
from fedcohort.report import figures
from fedcohort.report.data import boards, load_bundle
from fedcohort.report.figures import general_figures, seed_band, trailing_mean
from fedcohort.report.insights import selector_figures
from fedcohort.selectors import FedCor
from fedcohort.simulate.leaderboard.words import number


@pytest.fixture(scope="module")
def setting(experiment):
    return load_bundle([experiment]).settings[0]


@pytest.fixture(scope="module")
def board(setting):
    return boards([setting])[0]


def series(figure, label, view=0):
    return next(s for s in figure.spec["views"][view]["series"] if s["label"] == label)


def test_every_figure_is_there_and_is_json(setting, board):
    special, warnings = selector_figures(setting)
    found = [*general_figures(setting, board), *special]
    assert [f.name for f in found] == [
        "accuracy", "ranks", "loss", "balance", "picks", "participation", "cost", "scenario",
        "fedcor-map", "fedcm-arms", "fedacs-skewness", "flash-coefficients",
    ]  # fmt: skip
    assert not warnings
    for figure in found:
        json.dumps(figure.spec, allow_nan=False)
        assert figure.sentence.endswith(".") and "nan" not in figure.sentence.lower()


def test_the_accuracy_band_is_mean_and_deviation_over_seeds(setting, board):
    figure = figures.accuracy(setting, board)
    group = next(g for g in setting.groups if g.label == "fedcbs")
    rows = np.array([run.evaluations("accuracy")[1] for run in group.runs])
    drawn = series(figure, "fedcbs")
    np.testing.assert_allclose(drawn["y"], rows.mean(axis=0), rtol=1e-4)
    np.testing.assert_allclose(drawn["hi"], rows.mean(axis=0) + rows.std(axis=0, ddof=1), rtol=1e-4)
    assert drawn["x"] == group.runs[0].evaluations("accuracy")[0].tolist()


def test_over_time_the_last_measured_value_holds():
    band = seed_band([(np.array([1.0, 3.0]), np.array([0.2, 0.6])), (np.array([2.0, 4.0]), np.array([0.4, 0.8]))], True)
    # both are known from 2 on, and the first ends at 3
    assert band["x"][0] == 2.0 and band["x"][-1] == 3.0
    assert band["y"][0] == pytest.approx((0.2 + 0.4) / 2)
    assert band["y"][-1] == pytest.approx((0.6 + 0.4) / 2)


def test_seeds_evaluated_in_different_rounds_use_their_common_rounds():
    band = seed_band([(np.array([0.0, 2.0, 4.0]), np.arange(3.0)), (np.array([0.0, 4.0]), np.array([1.0, 3.0]))], False)
    assert band["x"] == [0.0, 4.0] and band["y"] == [0.5, 2.5]


def test_smoothing_is_a_trailing_mean():
    values = np.array([1.0, 2.0, 3.0, 4.0])
    np.testing.assert_allclose(trailing_mean(values, 2), [1.0, 1.5, 2.5, 3.5])


def test_the_heat_map_shows_exactly_the_picks(setting):
    figure = figures.picks(setting)
    for view, group in zip(figure.spec["views"], setting.groups, strict=True):
        cells = np.frombuffer(base64.b64decode(view["cells"]), np.uint8).reshape(view["rows"], view["cols"])
        expected = np.zeros((setting.n_clients, setting.rounds), bool)
        expected[group.runs[0].pick_client, group.runs[0].pick_round] = True
        assert (cells > 0).tolist() == expected.tolist()


def test_many_rounds_and_clients_are_binned_without_losing_picks(setting, monkeypatch):
    monkeypatch.setattr(figures, "HEAT_COLUMNS", 7)
    monkeypatch.setattr(figures, "HEAT_ROWS", 6)
    view = figures.picks(setting).spec["views"][0]
    cells = np.frombuffer(base64.b64decode(view["cells"]), np.uint8) / 255 * view["max"]
    run = setting.groups[0].runs[0]
    assert (cells * view["xstep"] * view["ystep"]).sum() == pytest.approx(len(run.pick_client), rel=0.02)


def test_the_cost_split_adds_up(setting, board):
    figure = figures.cost(setting, board)
    by_name = {view["name"]: {row["label"]: row["parts"] for row in view["rows"]} for view in figure.spec["views"]}
    for group in setting.groups:
        total = np.mean([run.total_bytes[-1] for run in group.runs])
        assert sum(by_name["Bytes"][group.label]) == pytest.approx(total, rel=1e-4)
        clock = np.mean([run.values["clock"][-1] for run in group.runs])
        assert sum(by_name["Simulated time"][group.label]) == pytest.approx(clock, rel=1e-4)
    assert by_name["Bytes"]["uniform"][1] == 0 and by_name["Bytes"]["fedcor"][1] > 0


def test_sentences_name_the_selectors_that_the_numbers_name(setting, board):
    for group in setting.groups:
        mean = np.mean([run.evaluations("qcid")[1].mean() for run in group.runs])
        assert f"{group.label} {number(mean)}" in figures.balance(setting).sentence
    best = max(board.rows, key=lambda row: row.terminal.mean)
    assert f"{best.label} " in figures.accuracy(setting, board).sentence


def test_the_scenario_shows_every_sample(setting):
    view = figures.scenario(setting).spec["views"][0]
    cells = np.frombuffer(base64.b64decode(view["cells"]), np.uint8).reshape(view["rows"], view["cols"])
    counts = setting.federation().label_counts
    order = [int(name) for name in view["xnames"]]
    assert ((cells > 0) == (counts[order].T > 0)).all()


def test_arms_are_the_posterior_of_the_journal(setting):
    from contextlib import closing

    from fedcohort.journal import read_journal

    figure = next(f for f in selector_figures(setting)[0] if f.name == "fedcm-arms")
    group = next(g for g in setting.groups if g.selector == "fedcm-ts")
    with closing(read_journal(group.runs[0].journal)) as journal:
        state = journal.state("")
    view = next(v for v in figure.spec["views"] if v["name"] == "fedcm-ts")
    mean = state["kept"] / (state["kept"] + state["dropped"])
    shown = {int(name): mid for name, mid in zip(view["names"], view["mid"], strict=True)}
    np.testing.assert_allclose([shown[k] for k in range(len(mean))], mean, rtol=1e-4)
    assert view["mid"] == sorted(view["mid"], reverse=True)
    assert all(lo <= mid <= hi for lo, mid, hi in zip(view["lo"], view["mid"], view["hi"], strict=True))


def test_the_map_places_every_client_and_knows_its_class(setting):
    figure = next(f for f in selector_figures(setting)[0] if f.name == "fedcor-map")
    view = figure.spec["views"][0]
    main = setting.federation().label_counts.argmax(axis=1)
    assert view["category"] == main.tolist()
    assert len(view["px"]) == len(view["py"]) == setting.n_clients


def test_flash_coefficients_are_those_in_its_notes(setting):
    from contextlib import closing

    from fedcohort.journal import read_journal

    figure = next(f for f in selector_figures(setting)[0] if f.name == "flash-coefficients")
    group = next(g for g in setting.groups if g.selector == "flash")
    with closing(read_journal(group.runs[0].journal)) as journal:
        last = journal.cohorts()[-1].notes
    for line in figure.spec["views"][0]["series"]:
        assert line["y"][-1] == pytest.approx(last[f"theta {line['label']}"], rel=1e-4)


def test_an_unreadable_journal_is_only_a_warning(small):
    for file in (small / "journal").glob("fedcm-ts*.sqlite"):
        file.write_bytes(b"this is not a database" * 500)
    found, warnings = selector_figures(load_bundle([small]).settings[0])
    assert found == [] and any("cannot be shown" in text for text in warnings)


def test_a_figure_that_cannot_be_drawn_is_only_a_warning(experiment, monkeypatch):
    def broken(record):
        return Points(np.full((len(record.state["embedding"]), 2), np.nan))

    (picture,) = FedCor.pictures
    monkeypatch.setattr(FedCor, "pictures", (dataclasses.replace(picture, view=broken),))
    found, warnings = selector_figures(load_bundle([experiment]).settings[0])
    assert picture.name not in {figure.name for figure in found} and len(found) > 2
    assert [text for text in warnings if f"The figure '{picture.title}' cannot be drawn: ValueError" in text]
