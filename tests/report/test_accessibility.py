"""Accessibility: colour blindness, names on a phone, the keyboard, and what axe-core finds."""

from __future__ import annotations

import hashlib
import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from selenium.webdriver.common.keys import Keys

from fedcohort.report import palette
from fedcohort.report.render import render

AXE = Path(__file__).parent / "axe"
MINIMUM = 18.0  # CIEDE2000 between any two lines of one dash pattern; 2.3 is just noticeable side by side
CONTRAST = 4.5  # of WCAG AA for text; the names at the ends of lines have the colours of the lines

# -- colours --------------------------------------------------------------------------------------------------------


def linear(colour):
    values = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


# Viénot, Brettel and Mollon (1999): cone responses from linear RGB, the missing cone computed from the two others.
TO_LMS = np.array([[17.8824, 43.5161, 4.11935], [3.45565, 27.1554, 3.86714], [0.0299566, 0.184309, 1.46709]])
MISSING = {
    "normal": np.eye(3),
    "protanopia": np.array([[0, 2.02344, -2.52581], [0, 1, 0], [0, 0, 1]]),
    "deuteranopia": np.array([[1, 0, 0], [0.494207, 0, 1.24827], [0, 0, 1]]),
}


def seen_by(colour, eyes):
    return np.clip(np.linalg.inv(TO_LMS) @ MISSING[eyes] @ TO_LMS @ linear(colour), 0, 1)


def lab(rgb):
    to_xyz = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]]
    xyz = np.array(to_xyz) @ rgb / [0.95047, 1.0, 1.08883]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return 116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])


def ciede2000(one, other):
    (l1, a1, b1), (l2, a2, b2) = one, other
    mean = (np.hypot(a1, b1) + np.hypot(a2, b2)) / 2
    g = 0.5 * (1 - np.sqrt(mean**7 / (mean**7 + 25**7)))
    c1, c2 = np.hypot(a1 * (1 + g), b1), np.hypot(a2 * (1 + g), b2)
    h1, h2 = (np.degrees(np.arctan2(b, a * (1 + g))) % 360 for a, b in ((a1, b1), (a2, b2)))
    turn = (h2 - h1 + 180) % 360 - 180 if c1 * c2 else 0.0
    dl, dc, dh = l2 - l1, c2 - c1, 2 * np.sqrt(c1 * c2) * np.sin(np.radians(turn / 2))
    lm, cm = (l1 + l2) / 2, (c1 + c2) / 2
    hm = (h1 + turn / 2) % 360 if c1 * c2 else h1 + h2
    t = 1 - 0.17 * np.cos(np.radians(hm - 30)) + 0.24 * np.cos(np.radians(2 * hm))
    t += 0.32 * np.cos(np.radians(3 * hm + 6)) - 0.2 * np.cos(np.radians(4 * hm - 63))
    sl = 1 + 0.015 * (lm - 50) ** 2 / np.sqrt(20 + (lm - 50) ** 2)
    sc, sh = 1 + 0.045 * cm, 1 + 0.015 * cm * t
    rt = -2 * np.sqrt(cm**7 / (cm**7 + 25**7)) * np.sin(np.radians(60 * np.exp(-(((hm - 275) / 25) ** 2))))
    return float(np.sqrt((dl / sl) ** 2 + (dc / sc) ** 2 + (dh / sh) ** 2 + rt * dc / sc * dh / sh))


def test_the_difference_of_colours_is_that_of_the_published_examples():
    # Sharma, Wu and Dalal (2005), pairs 1, 7, 13 and 25
    for one, other, expected in [
        ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425),
        ((50, 0, 0), (50, -1, 2), 2.3669),
        ((50, -0.001, 2.49), (50, 0.0009, -2.49), 4.8045),
        ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
    ]:
        assert ciede2000(one, other) == pytest.approx(expected, abs=2e-4)


def colour(name, theme):
    """A colour of the style sheet, in the light (0) or the dark (1) theme."""
    return re.findall(rf"--{name}:(#\w{{6}})", render("colours.css"))[theme]


def colours(theme):
    return [colour(f"s{slot}", theme) for slot in range(palette.COLOURS)]


def closest(lines, eyes):
    drawn = palette.assign(str(i) for i in range(len(lines)))
    return min(
        ciede2000(lab(seen_by(lines[a], eyes)), lab(seen_by(lines[b], eyes)))
        for (a, dash), (b, other) in itertools.combinations(drawn.values(), 2)
        if dash == other
    )


@pytest.mark.parametrize("eyes", list(MISSING))
@pytest.mark.parametrize("theme", [0, 1])
def test_lines_of_one_dash_pattern_can_be_told_apart(theme, eyes):
    assert closest(colours(theme), eyes) >= MINIMUM


def test_the_simulation_finds_colours_that_cannot_be_told_apart():
    red_and_green = ["#9b4a00", "#5f6f00", "#000000", "#0000ff"]  # of one lightness
    assert closest(red_and_green, "normal") > MINIMUM > closest(red_and_green, "deuteranopia")


@pytest.mark.parametrize("theme", [0, 1])
def test_every_colour_contrasts_with_the_page(theme):
    def luminance(line):
        return float(linear(line) @ [0.2126, 0.7152, 0.0722])

    grounds = [colour(name, theme) for name in ("surface", "page")]
    for line, ground in itertools.product(colours(theme), grounds):
        bright, dim = sorted([luminance(line), luminance(ground)], reverse=True)
        assert (bright + 0.05) / (dim + 0.05) >= CONTRAST, (line, ground)


def test_the_fifth_selector_is_dashed_and_no_two_are_drawn_alike():
    drawn = list(palette.assign(f"selector {i}" for i in range(36)).values())
    assert [dash for _, dash in drawn[:12]] == [0] * 4 + [1] * 4 + [2] * 4
    assert len(set(drawn)) == 36


# -- in a browser ---------------------------------------------------------------------------------------------------


def opened(page, url):
    page.driver.get(url)
    page.js("FC.drawAll()")
    page.wait("document.querySelectorAll('.chart[data-state=drawn]').length >= 12")


def test_axe_has_the_pinned_version():
    digest = hashlib.sha256((AXE / "axe.min.js").read_bytes()).hexdigest()
    assert digest in (AXE / "README.md").read_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390])
def test_axe_finds_nothing_in_the_report(page, report_url, violations, width, scheme):
    page.size(width)
    page.scheme(scheme)
    opened(page, report_url)
    assert violations(page) == []


def test_axe_finds_what_is_wrong(page, report_url, violations):
    opened(page, report_url)
    page.js("document.querySelector('h1').outerHTML = '<img src=\"data:,\"><button></button>'")
    assert {found[0] for found in violations(page)} >= {"image-alt", "button-name"}


def test_lines_carry_their_names_on_a_phone(page, report_url):
    page.size(390)
    opened(page, report_url)
    shown = page.js(
        """const svg = document.querySelector('[data-figure="0-accuracy"] .plot svg');
        const width = svg.clientWidth;
        return [...svg.querySelectorAll('text[font-weight="600"]')].map(
          t => [t.textContent, t.getBBox().x + t.getBBox().width <= width + 1])"""
    )
    assert len(shown) == 7 and all(inside for _, inside in shown)
    assert "uniform" in [text for text, _ in shown] and any(text.startswith("fedc") for text, _ in shown)


def test_the_keyboard_reads_zooms_switches_and_hides(page, report_url):
    opened(page, report_url)
    find = page.driver.find_element
    plot = find("css selector", "[data-figure='0-accuracy'] .plot")
    page.js("arguments[0].focus()", plot)
    plot.send_keys(Keys.ARROW_RIGHT)
    tip = find("css selector", "[data-figure='0-accuracy'] .tip")
    first = tip.text
    assert tip.is_displayed() and "fedcbs" in first
    plot.send_keys(Keys.SHIFT + Keys.ARROW_LEFT)
    assert tip.text != first
    plot.send_keys("+")
    zoom = page.js("return FC.charts.find(c => c.spec.file === 'accuracy').zoom")
    assert 0 <= zoom[0] < zoom[1] <= 23
    plot.send_keys(Keys.HOME)
    assert page.js("return FC.charts.find(c => c.spec.file === 'accuracy').zoom") is None
    tab = find("css selector", "[data-figure='0-accuracy'] [role=tab]")
    page.js("arguments[0].focus()", tab)
    tab.send_keys(Keys.ARROW_RIGHT)
    assert page.js("return FC.charts.find(c => c.spec.file === 'accuracy').view") == 1
    assert page.js("return document.activeElement.getAttribute('aria-selected')") == "true"
    legend = find("css selector", "[data-figure='0-accuracy'] .legend button")
    page.js("arguments[0].focus()", legend)
    legend.send_keys(Keys.ENTER)
    assert page.js("return document.activeElement.getAttribute('aria-pressed')") == "false"
    assert page.errors() == []


def test_headings_lead_through_the_report(page, report_url):
    opened(page, report_url)
    levels = page.js("return [...document.querySelectorAll('h1,h2,h3,h4')].map(h => +h.tagName[1])")
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
