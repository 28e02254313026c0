"""The HTML file itself: self-contained, safe, honest about what is missing."""

from __future__ import annotations

import json
import re

import pytest

from fedcohort.report.figure import Figure, figure_html
from fedcohort.report.page import assemble, build_report


@pytest.fixture(scope="module")
def html(experiment):
    return build_report(assemble([experiment]))


def test_the_page_refers_to_nothing_outside(html):
    addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.[a-z]{2,}[^\s\"'`<]*", html))
    assert addresses <= {"http://www.w3.org/2000/svg"}  # a name, not an address that is fetched
    assert not re.findall(r"<(?:script|img|iframe)[^>]+src=", html)
    assert "default-src 'none'" in html


def test_small_enough(html):
    assert len(html.encode()) < 6_000_000


def test_every_figure_has_a_sentence_and_downloads(html):
    data = json.loads(re.search(r'id="data">(.*?)</script>', html, re.DOTALL)[1])
    assert len(data["figures"]) == 12
    assert html.count('<figure class="card"') == 12 == html.count('data-save="csv"')
    for figure in data["figures"].values():
        assert figure["sentence"]


def test_names_cannot_break_out_of_the_page(toy, tmp_path):
    evil = '</script><img src=x onerror=alert(1)>"&'
    path = toy.make_experiment(tmp_path / "evil", [toy.Choice("uniform")], seeds=1, rounds=3, clients=6, size=2)
    runs = json.loads((path / "runs.json").read_text())
    runs[0]["label"] = evil
    runs[0]["setting"] = {"name": evil}
    (path / "runs.json").write_text(json.dumps(runs))
    html = build_report(assemble([path], title=evil))
    assert "<img" not in html and evil not in html
    assert html.count("</script>") == 2


def test_what_a_chart_draws_survives_the_page():
    spec = {"kind": "lines", "views": [{"name": "</script>\u2028<!--&'", "series": [1.5, None]}]}
    html = figure_html(Figure("odd", "<b>\u202e", "&", spec))
    data = re.search(r'id="data">(.*?)</script>', html, re.DOTALL)[1]
    assert "<" not in data and "\u2028" not in data
    drawn = json.loads(data)["figures"]["0-odd"]
    assert drawn["views"] == spec["views"] and drawn["title"] == "<b>\u202e"
    assert "<h2>&lt;b&gt;\\u202e</h2>" in html  # what turns the direction of text is written out


def test_a_page_refuses_numbers_that_are_not_json():
    with pytest.raises(ValueError, match="JSON"):
        figure_html(Figure("odd", "t", "s", {"kind": "lines", "views": [float("nan")]}))


def test_a_running_experiment_carries_a_warning(toy, tmp_path):
    running = toy.start_experiment(tmp_path / "going", seeds=1, rounds=20, clients=8, size=2)
    running.play(4)
    assert "still running" in build_report(assemble([running.path]))


def test_a_report_without_journals_has_everything_else(toy, tmp_path):
    path = toy.make_experiment(
        tmp_path / "bare",
        [toy.Choice("uniform"), toy.Choice("fedcm-ts")],
        seeds=1,
        rounds=6,
        clients=8,
        size=2,
        journal=False,
    )
    report = assemble([path])
    assert [f.name for f in report.sections[0].figures][-1] == "scenario"
    assert "Why these clients?" not in build_report(report)


def test_several_settings_get_a_tab_each(toy, tmp_path):
    path = toy.make_experiment(
        tmp_path / "sweep", [toy.Choice("uniform")], seeds=1, rounds=4, clients=12, size=2,
        settings=({"name": "small"}, {"name": "large"}),
    )  # fmt: skip
    html = build_report(assemble([path]))
    assert html.count('role="tab" aria-selected') >= 2 and html.count('class="pane"') == 2
    data = json.loads(re.search(r'id="data">(.*?)</script>', html, re.DOTALL)[1])
    files = [figure["file"] for figure in data["figures"].values()]
    assert len(set(files)) == len(files)
