"""Results, leaderboards and figures as a notebook shows them, and as objects to work with."""

from __future__ import annotations

import re

import numpy as np
import pytest

from fedcohort.core.errors import ParameterError, UnknownNameError
from fedcohort.report import load_figures
from fedcohort.simulate.leaderboard.significance import half_interval
from fedcohort.simulate.store.results import load


def test_every_row_of_a_data_frame_names_its_run(toy, tmp_path):
    path = toy.make_experiment(
        tmp_path / "sweep", [toy.Choice("uniform"), toy.Choice("fedcbs", "ours")], seeds=2, rounds=3, clients=8, size=2,
        settings=({"name": "small"}, {"name": "large"}),
    )  # fmt: skip
    results = load(path)
    frame = results.to_pandas()
    assert list(frame.columns[:5]) == ["label", "selector", "seed", "setting", "run"] and len(frame) == 2 * 2 * 2 * 3
    runs = {run.id: run for run in results.runs}
    for row in frame.itertuples():
        info = runs[row.run]
        assert (row.label, row.selector, row.seed) == (info.label, info.selector, info.seed)
        assert row.setting == info.setting["name"]
    ends = frame.groupby(["setting", "label", "seed"])["round"].max()
    assert (ends == 2).all() and len(ends) == 8
    clients = results.to_pandas("clients")
    assert len(clients) == results.clients.num_rows and set(clients["label"]) == {"uniform", "ours"}
    with pytest.raises(UnknownNameError, match="rounds, clients"):
        results.to_pandas("weights")


def test_results_and_leaderboards_are_readable(experiment):
    results = load(experiment)
    (board,) = results.leaderboards()
    for text in (results._repr_html_(), board._repr_html_()):
        assert text.count("<table>") == 1 and "Gain over uniform" in text.replace("&#8209;", "-")
        assert "var(--" not in text  # colours of the report are not there in a notebook
        assert len(re.findall("<tr>", text)) == 1 + len(board.rows)
    assert "finished" in results._repr_html_() and "14 runs" in results._repr_html_()
    assert max(map(len, str(board).splitlines())) <= 80


def test_a_figure_is_an_object(experiment, tmp_path):
    found = load_figures(experiment)
    assert {"accuracy", "ranks", "picks"} <= set(found)
    assert found["accuracy"].views == ("Rounds", "Simulated time", "Bytes")
    assert "<iframe srcdoc=" in found["accuracy"]._repr_html_()
    assert "<script>" in found["ranks"].save(tmp_path / "ranks.html").read_text()
    with pytest.raises(ParameterError, match="svg"):
        found["ranks"].save(tmp_path / "ranks.gif")
    with pytest.raises(UnknownNameError, match="did you mean 'Bytes'"):
        found["accuracy"].save(tmp_path / "a.svg", view="Byte")
    with pytest.raises(UnknownNameError, match="other"):
        load_figures(experiment, setting="other")


def test_a_figure_is_drawn_in_a_notebook_and_saved(page, experiment, tmp_path):
    figure = load_figures(experiment)["ranks"]
    (tmp_path / "cell.html").write_text(f"<!doctype html><meta charset=utf-8>{figure._repr_html_()}", encoding="utf-8")
    page.driver.get((tmp_path / "cell.html").as_uri())
    page.driver.switch_to.frame(0)
    page.wait("document.querySelectorAll('.chart[data-state=drawn]').length === 1")
    page.driver.switch_to.default_content()
    assert page.errors() == []
    svg = figure.save(tmp_path / "ranks.svg").read_text()
    assert svg.startswith("<svg") and "critical difference" in svg and "fedcbs" in svg
    assert figure.save(tmp_path / "ranks.csv").read_text().startswith("view,selector,mean rank")


def test_results_are_plotted_for_a_paper(experiment, tmp_path):
    pytest.importorskip("matplotlib")
    results = load(experiment)
    figure = results.plot()
    (board,) = results.leaderboards()
    curves, arrivals, *_ = figure.axes
    assert [line.get_label() for line in curves.lines] == [row.label for row in board.rows]
    runs = [run for run in results.runs if run.label == board.rows[0].label or run.selector == board.rows[0].label]
    last = [results.score(run)[np.isfinite(results.score(run))][-1] for run in runs]
    assert curves.lines[0].get_ydata()[-1] == pytest.approx(np.mean(last))
    (band,) = [one.get_paths()[0].vertices for one in curves.collections[:1]]
    rounds = band[:, 0].max()
    width = np.ptp(band[band[:, 0] == rounds][:, 1])
    assert width == pytest.approx(2 * half_interval(np.array(last)), rel=1e-5)
    assert f"{board.rows[0].label} (" in arrivals.get_yticklabels()[0].get_text()
    turns = figure.axes[-1]
    assert sum(turns.lines[0].get_ydata()) == pytest.approx(sum(map(len, results.cohorts(runs[0]))), rel=0.2)
    figure.savefig(tmp_path / "figure.pdf")
    with pytest.raises(UnknownNameError):
        results.plot("no such setting")
