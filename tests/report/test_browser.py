"""The report in a real browser."""

from __future__ import annotations

import re

import pytest

from fedcohort.report.page import assemble, build_report

FIGURES = 12


def opened(page, url):
    page.driver.get(url)
    page.js("FC.drawAll()")
    page.wait(f"document.querySelectorAll('.chart[data-state=drawn]').length === {FIGURES}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390])
def test_every_plot_has_data_and_nothing_is_requested_or_overflows(page, report_url, width, scheme):
    page.size(width)
    page.scheme(scheme)
    opened(page, report_url)
    assert (
        page.js("return [...document.querySelectorAll('.chart')].filter(c => c.dataset.state !== 'drawn').length") == 0
    )
    marks = page.js(
        """return [...document.querySelectorAll('.plot svg')].map(
             s => s.querySelectorAll('path, circle, rect, image').length)"""
    )
    assert len(marks) == FIGURES and min(marks) > 0
    assert page.overflow() == []
    assert page.errors() == []
    assert [url for url in page.requests() if url != report_url] == []
    background = page.js("return getComputedStyle(document.documentElement).backgroundColor")
    light = sum(map(int, re.findall(r"\d+", background)[:3])) > 380
    assert light == (scheme == "light")


def test_every_view_of_every_plot_draws(page, report_url):
    opened(page, report_url)
    empty = page.js(
        """const bad = [];
        for (const c of FC.charts) for (let i = 0; i < c.spec.views.length; i++) {
          c.show(i);
          if (c.host.dataset.state !== 'drawn') bad.push(c.spec.title + ' ' + c.spec.views[i].name);
        }
        return bad;"""
    )
    assert empty == [] and page.errors() == []


def test_the_csv_has_the_numbers_of_the_figure(page, report_url):
    opened(page, report_url)
    rows = page.js("return FC.charts.map(c => [c.spec.file, c.csv().trim().split('\\n').length])")
    assert dict(rows).keys() >= {"accuracy", "picks", "cost", "scenario", "fedcor-map"}
    assert all(count > 1 for _, count in rows)
    head, first = page.js("return FC.charts.find(c => c.spec.file === 'accuracy').csv().split('\\n').slice(0, 2)")
    assert head == "view,series,x,test accuracy,low,high"
    spec = page.js("return FC.charts.find(c => c.spec.file === 'accuracy').spec.views[0].series[0]")
    assert float(first.split(",")[3]) == spec["y"][0]


def test_hover_legend_and_zoom(page, report_url):
    from selenium.webdriver.common.action_chains import ActionChains

    opened(page, report_url)
    plot = page.driver.find_element("css selector", "[data-figure='0-accuracy'] .plot")
    page.js("arguments[0].scrollIntoView({block: 'center'})", plot)
    ActionChains(page.driver).move_to_element(plot).perform()
    tip = page.driver.find_element("css selector", "[data-figure='0-accuracy'] .tip")
    assert tip.is_displayed() and "fedcbs" in tip.text and "%" in tip.text
    lines = 'document.querySelectorAll(\'[data-figure="0-accuracy"] svg path[stroke-width="1.8"]\').length'
    before = page.js(f"return {lines}")
    page.driver.find_elements("css selector", "[data-figure='0-accuracy'] .legend button")[0].click()
    assert page.js(f"return {lines}") == before - 1
    ActionChains(page.driver).move_to_element(plot).click_and_hold().move_by_offset(150, 0).release().perform()
    zoom = page.js("return FC.charts.find(c => c.spec.file === 'accuracy').zoom")
    assert zoom is not None and 0 < zoom[0] < zoom[1] < 24
    page.driver.find_element("css selector", "[data-figure='0-accuracy'] .reset").click()
    assert page.js("return FC.charts.find(c => c.spec.file === 'accuracy').zoom") is None
    assert page.errors() == []


def test_lines_are_filtered_grouped_and_smoothed_in_every_chart(page, report_url):
    opened(page, report_url)
    page.js("""window.drawn = (file) => FC.charts.find(c => c.spec.file === file).current.series.map(s => s.label)""")
    page.js("""window.turn = (shape, value) => {
      const field = document.querySelector(`[data-figure='0-accuracy'] [data-shape=${shape}]`);
      if (field.type === 'checkbox') field.checked = value; else field.value = value;
      field.dispatchEvent(new Event('input'));
    }""")
    every = page.js("return drawn('accuracy')")
    assert len(every) > 2
    page.js("turn('filter', 'FEDCBS, uni')")
    kept = page.js("return drawn('accuracy')")
    assert kept and kept == [label for label in every if "fedcbs" in label or "uni" in label] and kept != every
    assert page.js("return drawn('loss')") == kept  # the same in every chart
    page.js("turn('filter', '')")
    assert page.js("return FC.smoothed([1, 3, null, 5], 2)") == [1, 2, None, 5]
    assert page.js("FC.lines.smooth = 5; FC.redraw(); return drawn('accuracy')") == every
    merged = page.js("return FC.merged('a', [{x: [0, 1, 2], y: [1, 2, 3]}, {x: [0, 1], y: [3, 4]}])")
    assert merged["label"] == "a (mean of 2)" and merged["x"] == [0, 1] and merged["y"] == [2, 3]
    assert merged["lo"] == [1, 2] and merged["hi"] == [3, 4]
    assert page.errors() == []


def test_parts_of_scores_are_explained(page, report_url):
    opened(page, report_url)
    titles = page.js("return [...document.querySelectorAll('.why abbr')].map(a => a.title)")
    assert titles and all(len(title) > 10 for title in titles)
    said = page.js("return document.querySelector('.why [data-role=table] p').textContent")
    assert "chance" in said or "picked" in said


def test_explanations_can_be_browsed(page, report_url):
    opened(page, report_url)
    options = page.js("return [...document.querySelectorAll('.why select option')].map(o => o.textContent)")
    assert any("fedcm-ts" in text for text in options)
    text = page.js(
        """const [s, r] = document.querySelectorAll('.why select');
        s.value = [...s.options].findIndex(o => o.textContent.startsWith('fedcm-ts')); s.onchange();
        r.value = '0'; r.onchange();
        return document.querySelector('.why [data-role=table]').innerText"""
    )
    assert "Round 0: 5 of 20 candidates were picked" in text and "exploration" in text and "uniform" in text
    assert page.js(
        """const row = {client: 1, name: "1", picked: true, rank: 3, place: "3-5, tied", score: 0.5, parts: {}};
        const rows = [row, {...row, rank: null, place: ""}];
        const box = document.createElement("div");
        box.innerHTML = FC.whyTable({parts: [], picked: rows, nearly: [], shadows: [], reason: "", threshold: null});
        return [...box.querySelectorAll("tbody tr")].map(r => r.cells[2].textContent)"""
    ) == ["3-5, tied", "–"]


def test_the_theme_can_be_switched(page, report_url):
    opened(page, report_url)
    colours = set()
    for _ in range(3):
        page.driver.find_element("id", "theme").click()
        colours.add(page.js("return getComputedStyle(document.documentElement).backgroundColor"))
    assert len(colours) == 2


def test_settings_switch_and_draw(page, toy, tmp_path):
    path = toy.make_experiment(
        tmp_path / "sweep", [toy.Choice("uniform"), toy.Choice("fedcbs")], seeds=2, rounds=8, clients=12, size=2,
        settings=({"name": "small"}, {"name": "large"}),
    )  # fmt: skip
    (tmp_path / "report.html").write_text(build_report(assemble([path])), encoding="utf-8")
    page.size(390)
    page.driver.get((tmp_path / "report.html").as_uri())
    for number in ("1", "0"):
        page.js(f"document.querySelector('[data-setting=\"{number}\"]').click(); FC.drawAll()")
        visible = f"document.querySelectorAll('[data-pane=\"{number}\"] .chart[data-state=drawn]').length"
        page.wait(f"{visible} === 8")
        assert page.js("return document.querySelectorAll('.pane:not([hidden])').length") == 1
        assert page.overflow() == []
    assert page.errors() == []


@pytest.mark.parametrize("what", ["method", "toml-0"])
def test_the_method_and_the_setup_can_be_copied(page, report_url, what):
    opened(page, report_url)
    text = f"document.querySelector('[data-copy={what}]').textContent"
    label = page.js(f"return {text}")
    page.driver.find_element("css selector", f"[data-copy={what}]").click()
    page.wait(f"['Copied', 'Selected: press Ctrl+C'].includes({text})")
    page.wait(f"{text} === {label!r}")
    assert page.errors() == []
