"""The dashboard: what it reads, who may see it, and how soon a browser shows a new round."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from dataclasses import replace

import httpx
import numpy as np
import pyarrow as pa
import pytest

from fedcohort.core.clients import ClientTable
from fedcohort.core.errors import InputError
from fedcohort.core.protocol import SELECTORS, RoundReport, RoundRequest
from fedcohort.journal.presence import Presence
from fedcohort.report.dashboard.server import check
from fedcohort.report.dashboard.watcher import Watcher
from fedcohort.session import Session
from fedcohort.simulate.store.parts import rounds_schema

CHOICES = ("uniform", "fedcm-ts")


@pytest.fixture
def running(toy, tmp_path):
    made = toy.start_experiment(
        tmp_path / "runs" / "going", [toy.Choice(name) for name in CHOICES], seeds=2, rounds=30, clients=12, size=3
    )
    made.play(6)
    return made


def seen(watcher, name="going"):
    watcher.poll()
    return watcher.items[name].detail()


# -- what it reads --------------------------------------------------------------------------------------------------


def test_a_running_simulation_is_followed_round_by_round(running):
    watcher = Watcher(running.path.parent)
    first = seen(watcher)
    assert first["state"] == "running" and first["done"] == 24 and first["total"] == 120
    assert {line["round"] for line in first["table"]} == {5}
    assert [f["name"] for f in first["sections"][0]["figures"]] == ["accuracy", "balance", "picks", "participation"]
    version = watcher.version
    watcher.poll()
    assert watcher.version == version  # nothing new, nothing sent
    run = running.runs[0]
    with running.feed() as feed:
        feed.add(run.step())
        after = seen(watcher)
        line = next(line for line in after["table"] if line["id"] == "uniform-s1")
        assert line["round"] == 6 and after["done"] == 25 and watcher.version != version
        chosen = run.session.journal.cohorts(round_=6)[0].clients.tolist()
        assert [member["client"] for member in line["cohort"]] == [str(c) for c in chosen]
        assert all(member["status"] for member in line["cohort"])
        json.dumps(after, allow_nan=False)


def test_rounds_that_were_lost_are_not_shown(running):
    """A killed process left rounds that no journal has; resuming runs them again."""
    watcher = Watcher(running.path)
    with running.feed() as feed:
        feed.add(running.runs[0].step())
        assert seen(watcher)["done"] == 25
    assert {line["round"] for line in seen(watcher)["table"]} == {5}
    running.play(1)
    assert {line["round"] for line in seen(watcher)["table"]} >= {6}


def test_a_client_that_delivers_nothing_is_a_straggler(running):
    run = running.runs[0]
    cohort = run.session.ask(RoundRequest(size=3))
    run.session.tell(RoundReport(cohort.ticket, cohort.clients, [0, 3, 0]))
    run.session.commit()
    row = dict.fromkeys(rounds_schema().names) | {"run": run.id, "round": 6, "durations": [1.0, 1.0, 99.0]}
    running.writer.append(pa.Table.from_pylist([{**row, "weights": [0.5, 0.0, 0.5]}], rounds_schema()))
    line = next(line for line in seen(Watcher(running.path))["table"] if line["id"] == "uniform-s1")
    assert [m["status"] for m in line["cohort"]] == ["ok", "late", "ok"]
    stragglers = {found["client"]: found for found in line["stragglers"]}
    assert stragglers[str(cohort.clients[1])]["trouble"] >= 1
    assert stragglers[str(cohort.clients[2])]["slow"] > 2


def test_damaged_and_unrelated_files_do_not_stop_it(running):
    root = running.path.parent
    (root / "broken").mkdir()
    (root / "broken" / "meta.json").write_text("{")
    (root / "notes.sqlite").write_text("not a journal")
    (root / "empty").mkdir()
    (running.path / "live.sqlite").write_text("garbage")
    watcher = Watcher(root)
    assert seen(watcher)["done"] == 24
    states = {line["id"]: line["state"] for line in watcher.overview()["items"]}
    assert states == {"going": "running", "broken": "unreadable", "notes.sqlite": "unreadable"}
    assert watcher.items["broken"].detail()["message"]


def test_an_explanation_comes_from_the_runs_journal(running):
    watcher = Watcher(running.path)
    watcher.poll()
    found = watcher.items["going"].why("fedcm-ts-s1", 3, None)
    assert found["round"] == 3 and len(found["picked"]) == 3 and found["parts"] == ["estimate", "exploration"]
    with pytest.raises(Exception, match="nobody"):
        watcher.items["going"].why("nobody", 3, None)


@pytest.fixture
def session(tmp_path):
    table = ClientTable(names=[f"site-{i}" for i in range(8)])
    made = Session(SELECTORS.create("fedcm-ts"), table, seed=1, journal=tmp_path / "server.sqlite")
    rng = np.random.default_rng(0)
    for r in range(6):
        cohort = made.ask(RoundRequest(size=3))
        duration = rng.uniform(1, 2, 3) + np.where(cohort.clients == 2, 30.0, 0.0)
        made.tell(RoundReport(cohort.ticket, cohort.clients, [0, 0, 0], {"duration": duration}, [True, True, False]))
        made.record(r, {"accuracy": 0.1 * r, "loss": 1.0 - 0.1 * r})
    yield made
    made.close()


def test_a_live_session_is_followed(session):
    watcher = Watcher(session.journal.path)
    watcher.poll()
    (item,) = watcher.items.values()
    detail = item.detail()
    assert detail["state"] == "running" and detail["done"] == 6
    assert [f["name"] for f in detail["sections"][0]["figures"]] == [
        "metrics", "durations", "outcomes", "picks", "participation",
    ]  # fmt: skip
    cohort = session.ask(RoundRequest(size=3))
    session.tell(RoundReport(cohort.ticket, cohort.clients[:1], [1], {"duration": [1.0]}, complete=False))
    before = item.version
    watcher.poll()
    assert item.version == before + 1
    (line,) = item.detail()["table"]
    assert line["round"] == 6
    assert [m["client"] for m in line["cohort"]] == list(cohort.names)
    assert [m["status"] for m in line["cohort"]] == ["failed", "training", "training"]
    later = item.cohort("", 6)  # those who still train have trained a little longer by now
    assert [(m["client"], m["status"]) for m in later] == [(m["client"], m["status"]) for m in line["cohort"]]
    assert all(m["seconds"] >= before["seconds"] for m, before in zip(later, line["cohort"], strict=True))
    assert {member["status"] for member in item.cohort("", 2)} == {"ok"} and len(item.cohort("", 2)) == 3
    with pytest.raises(InputError, match="99"):
        item.cohort("", 99)
    why = item.why("", 6, cohort.names[0])
    assert why["was_picked"] and why["name"] == cohort.names[0]
    json.dumps(item.detail(), allow_nan=False)


def test_a_slow_site_is_a_straggler(session):
    watcher = Watcher(session.journal.path)
    watcher.poll()
    (item,) = watcher.items.values()
    (line,) = item.detail()["table"]
    slow = [s["client"] for s in line["stragglers"] if (s["slow"] or 0) > 5]
    asked = {name for row in session.journal.cohorts() for name in [f"site-{c}" for c in row.clients.tolist()]}
    assert slow == (["site-2"] if "site-2" in asked else [])
    assert "site-2" in asked  # otherwise this test shows nothing


# -- who may see it -------------------------------------------------------------------------------------------------


class Server:
    """The dashboard on a free port, in a thread."""

    def __init__(self, root, token=None):
        import uvicorn

        from fedcohort.report.dashboard.app import create_app

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        app = create_app(root, token=token, stopping=lambda: self.server.should_exit)
        config = uvicorn.Config(app, port=self.port, log_level="error", timeout_graceful_shutdown=2)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self):
        self.thread.start()
        for _ in range(200):
            if self.server.started:
                return self
            time.sleep(0.05)
        raise AssertionError("the dashboard did not start")

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join(10)


def test_a_public_address_needs_a_token(tmp_path):
    for host in ("0.0.0.0", "192.168.1.5", "::", "example.org"):
        with pytest.raises(InputError, match="without a token"):
            check(tmp_path, host, None)
        check(tmp_path, host, "long-enough-secret")
    for host in ("127.0.0.1", "localhost", "::1"):
        check(tmp_path, host, None)
    with pytest.raises(InputError, match="8 characters"):
        check(tmp_path, "0.0.0.0", "short")
    with pytest.raises(InputError, match="folder"):
        check(tmp_path / "nowhere", "127.0.0.1", None)


def test_the_token_is_required_and_kept_out_of_the_address(running):
    with Server(running.path.parent, token="correct-horse") as served:
        assert httpx.get(served.url).status_code == 401
        assert httpx.get(f"{served.url}/api/overview").status_code == 401
        assert httpx.get(f"{served.url}/?token=wrong-horse").status_code == 401
        bearer = {"Authorization": "Bearer correct-horse"}
        assert httpx.get(f"{served.url}/api/overview", headers=bearer).json()["items"][0]["id"] == "going"
        with httpx.Client(follow_redirects=True) as client:
            answer = client.get(f"{served.url}/?token=correct-horse")
            assert answer.status_code == 200 and "token" not in str(answer.url)
            assert client.get(f"{served.url}/api/overview").status_code == 200


def test_another_name_for_this_machine_is_refused(running):
    with Server(running.path.parent) as served:
        assert httpx.get(f"{served.url}/api/overview").status_code == 200
        stranger = httpx.get(f"{served.url}/api/overview", headers={"Host": "evil.example"})
        assert stranger.status_code == 403


def test_the_api_answers_clearly(running):
    with Server(running.path.parent) as served:
        page = httpx.get(served.url)
        assert "default-src 'none'" in page.headers["content-security-policy"]
        query = {"item": "going", "run": "fedcm-ts-s1", "round": 2}
        found = httpx.get(f"{served.url}/api/explain", params=query).json()
        assert found["round"] == 2 and len(found["picked"]) == 3
        missing = httpx.get(f"{served.url}/api/explain", params={**query, "round": 99})
        assert missing.status_code == 404 and "rounds 0 to 5" in missing.json()["error"]
        assert httpx.get(f"{served.url}/api/detail", params={"item": "nothing"}).status_code == 404
        assert httpx.get(f"{served.url}/api/explain", params={**query, "run": "../../etc/passwd"}).status_code == 404


def test_the_api_returns_a_clients_history_in_a_live_run(session, running):
    with Server(session.journal.path.parent) as served:  # the experiment is in the same folder
        name = session.table.name(0)
        query = {"item": session.journal.path.name, "client": name}
        found = httpx.get(f"{served.url}/api/history", params=query)
        assert found.status_code == 200 and found.json()["client"] == name
        assert [one["round"] for one in found.json()["rounds"]] == list(range(6))
        ids = [item["id"] for item in httpx.get(f"{served.url}/api/overview").json()["items"]]
        (experiment,) = (id_ for id_ in ids if id_ != session.journal.path.name)
        refused = httpx.get(f"{served.url}/api/history", params={"item": experiment, "client": "0"})
        assert refused.status_code == 404 and "no live run" in refused.json()["error"]


# -- in a browser ---------------------------------------------------------------------------------------------------


@pytest.mark.clock
def test_a_new_round_is_shown_within_two_seconds(page, running):
    rounds = "Math.max(0, ...[...document.querySelectorAll('[data-run] [data-round]')].map(e => +e.textContent))"
    with Server(running.path.parent) as served:
        page.driver.get(f"{served.url}/#going")
        page.wait(f"{rounds} === 6")
        page.wait("document.querySelectorAll('.chart[data-state=drawn]').length === 4")
        waits = []
        for expected in (7, 8, 9):
            running.play(1)
            start = time.monotonic()
            page.wait(f"{rounds} === {expected}", 5)
            waits.append(time.monotonic() - start)
        assert max(waits) < 2.0, waits
        curve = page.js("return FC.charts.find(c => c.spec.name === 'accuracy').spec.views[0].series[0].x")
        assert curve[-1] == 8  # evaluated every other round, from 0
        assert page.errors() == []
        assert all(url.startswith(served.url) for url in page.requests())
        page.driver.get("about:blank")


def test_a_second_experiment_is_drawn_in_the_same_charts(page, running, toy, violations):
    other = toy.start_experiment(
        running.path.parent / "before", [toy.Choice(name) for name in CHOICES], seeds=1, rounds=9, clients=12, size=3
    )
    other.play(9)
    labels = "FC.charts.find(c => c.spec.name === 'accuracy').current.series.map(s => s.label)"
    with Server(running.path.parent) as served:
        page.driver.get(f"{served.url}/#going")
        page.wait("document.querySelectorAll('.chart[data-state=drawn]').length === 4")
        page.wait("document.getElementById('second') !== null")
        own = page.js(f"return {labels}")
        page.js(
            "const s = document.getElementById('second'); s.value = 'before'; s.dispatchEvent(new Event('change'));"
        )
        page.wait(f"{labels}.length === {2 * len(own)}")
        assert page.js(f"return {labels}") == [*own, *(f"{label} (before)" for label in own)]
        running.play(1)
        time.sleep(2.5)  # it stays while the first one continues
        assert len(page.js(f"return {labels}")) == 2 * len(own)
        assert page.errors() == [] and violations(page) == []
        page.js("const s = document.getElementById('second'); s.value = ''; s.dispatchEvent(new Event('change'));")
        page.wait(f"{labels}.length === {len(own)}")
        page.driver.get("about:blank")


def test_the_page_shows_offline_clients_and_that_the_server_is_gone(page, session, violations):
    """Names of clients are plain text; a released lock is news, although nothing is written."""
    path = session.journal.path
    away = {"<b>site-1</b>": time.time() - 7200, "site-2": time.time() - 2400}
    generation = session.journal.generation
    said = Presence("waiting", time.time() - 600, "6 of 8 clients have been online", time.time(), generation)
    replace(said, planned=20, online=6, offline=away, offline_count=2).write(path)
    with Server(path.parent) as served:
        page.size(390)
        page.driver.get(f"{served.url}/#server.sqlite")
        page.wait("document.getElementById('away') && document.getElementById('away').innerText.includes('site-2')")
        shown = page.js("return document.getElementById('away').innerText")
        assert "<b>site-1</b>" in shown and "(2.0 h)" in shown and re.search(r"site-2.*\(4[01] min\)", shown)
        head = page.js("return document.getElementById('head').innerText")
        assert "6 clients online, 2 offline" in head and "6 of 8 clients have been online" in head
        assert re.search(r"Waiting since .*\(1[01] min\)", head) and "left" not in head
        assert page.overflow() == [] and violations(page) == []
        os.unlink(f"{path}.live")
        page.wait("document.getElementById('head').innerText.includes('running')")
        assert page.js("return document.getElementById('away').hidden")
        session.close()
        page.wait("document.getElementById('head').innerText.includes('stopped')", 5)
        assert page.errors() == []
        page.driver.get("about:blank")


def test_explanations_on_click_phone_width_and_dark(page, running):
    with Server(running.path.parent) as served:
        page.size(390)
        page.scheme("dark")
        page.driver.get(f"{served.url}/#going")
        page.wait("document.querySelectorAll('.chart[data-state=drawn]').length === 4")
        page.js("document.querySelector('[data-run=\"fedcm-ts-s1\"]').click()")
        page.js("document.querySelector('[data-client]').click()")
        page.wait("document.getElementById('why').innerText.includes('was picked in round 5')")
        assert "Choose a client" in page.js("return document.getElementById('cohort').innerText")
        assert "exploration" in page.js("return document.getElementById('why').innerText")
        assert page.overflow() == []
        assert page.errors() == []
        page.driver.get("about:blank")


def test_any_round_can_be_opened_by_keyboard_and_stays_open(page, running):
    from selenium.webdriver.common.keys import Keys

    with Server(running.path.parent) as served:
        page.driver.get(f"{served.url}/#going")
        page.wait("document.querySelectorAll('.chart[data-state=drawn]').length === 4")
        link = page.driver.find_element("css selector", "[data-run='fedcm-ts-s1'] button")
        page.js("arguments[0].focus()", link)
        link.send_keys(Keys.ENTER)
        heading = "document.getElementById('cohort-title').innerText"
        page.wait(f"{heading} === 'Cohort of round 5, fedcm-ts-s1'")
        field = page.driver.find_element("id", "round")
        field.send_keys("2", Keys.ENTER)
        page.wait(f"{heading} === 'Cohort of round 2, fedcm-ts-s1'")
        page.wait("document.getElementById('why').innerText.includes('Why these clients in round 2?')")
        shown = page.js("return [...document.querySelectorAll('[data-client]')].map(b => b.dataset.client)")
        expected = httpx.get(
            f"{served.url}/api/cohort", params={"item": "going", "run": "fedcm-ts-s1", "round": 2}
        ).json()
        assert shown == [member["client"] for member in expected["cohort"]] and len(shown) == 3
        page.js("document.querySelector('[data-client]').focus()")
        running.play(1)  # news come in: what was opened stays open, and the keyboard keeps its place
        rounds = "[...document.querySelectorAll('[data-run] [data-round]')].map(e => +e.textContent)"
        page.wait(f"Math.max(...{rounds}) === 7")
        assert page.js(f"return {heading}") == "Cohort of round 2, fedcm-ts-s1"
        assert page.js("return document.activeElement.dataset.client") == shown[0]
        page.driver.find_element("id", "after").click()
        page.wait(f"{heading} === 'Cohort of round 3, fedcm-ts-s1'")
        page.driver.find_element("id", "latest").click()
        page.wait(f"{heading} === 'Cohort of round 6, fedcm-ts-s1'")
        missing = httpx.get(f"{served.url}/api/cohort", params={"item": "going", "run": "fedcm-ts-s1", "round": 99})
        assert missing.status_code == 404 and "is not recorded" in missing.json()["error"]
        assert page.errors() == []
        page.driver.get("about:blank")


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (1200, "dark"), (390, "light")])
def test_axe_finds_nothing_in_the_dashboard(page, running, violations, width, scheme):
    with Server(running.path.parent) as served:
        page.size(width)
        page.scheme(scheme)
        page.driver.get(f"{served.url}/#going")
        page.wait("document.querySelectorAll('.chart[data-state=drawn]').length === 4")
        page.js("document.querySelector('[data-client]').click()")
        page.wait("document.getElementById('why').innerText.includes('was picked')")
        assert violations(page) == []
        levels = page.js("return [...document.querySelectorAll('h1,h2,h3')].map(h => +h.tagName[1])")
        assert levels[0] == 1 and levels.count(1) == 1
        page.driver.get("about:blank")


def test_the_page_of_an_empty_folder_waits(page, tmp_path, toy):
    with Server(tmp_path) as served:
        page.driver.get(served.url)
        page.wait("document.body.innerText.includes('Nothing here yet')")
        toy.start_experiment(tmp_path / "new", [toy.Choice("uniform")], seeds=1, rounds=5, clients=6, size=2).play(1)
        page.wait("document.body.innerText.includes('1 of 5 rounds')")
        assert page.errors() == []
        page.driver.get("about:blank")


def test_numbers_for_prometheus(tmp_path):
    from fedcohort import ClientTable, Session, create
    from fedcohort.core.protocol import RoundReport, RoundRequest

    with Session(create("uniform"), ClientTable(n=5), journal=tmp_path / "live.sqlite") as session:
        cohort = session.ask(RoundRequest(2))
        session.tell(RoundReport(cohort.ticket, cohort.clients))
    with Server(tmp_path) as server:
        answer = httpx.get(f"{server.url}/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'fedcohort_rounds_total{journal="live.sqlite"} 1\n' in answer.text
