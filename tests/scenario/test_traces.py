"""Traces: the plain format, FedScale's and FLASH's; devices of a trace against brute force; fitting."""

from __future__ import annotations

import json
import pickle
from fractions import Fraction

import numpy as np
import pytest

from fedcohort.core.errors import ScenarioError
from fedcohort.scenario import Scenario
from fedcohort.scenario.devices import DrawnDevices, OnlineDevices, Sessions
from fedcohort.scenario.traces import FORMATS, Trace, TraceDevices, fit, read_trace, write_trace

ROWS = [
    ("anna", 0.0, 50.0, "wifi"),
    ("anna", 40.0, 70.0, "wifi"),  # overlaps the first
    ("anna", 20.0, 60.0, "charging"),
    ("ben", 10.0, 30.0, "wifi"),
    ("ben", 30.0, 100.0, "wifi"),  # goes on where the first ends
    ("ben", 0.0, 100.0, "charging"),
    ("cem", 0.0, 90.0, "wifi"),
]
SPEEDS = [("ben", 10.0, 1000.0), ("anna", 20.0, 500.0)]


@pytest.fixture
def files(tmp_path):
    intervals, speeds = tmp_path / "trace.csv", tmp_path / "speeds.csv"
    write_trace(Trace.of(ROWS, SPEEDS), intervals, speeds)
    return str(intervals), str(speeds)


def is_on(name: str, time: float) -> bool:
    """Whether all states hold, straight from the rows."""
    held = {state for who, a, b, state in ROWS if who == name and a <= time % 100.0 < b}
    return held == {"wifi", "charging"}


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_the_plain_format_survives_a_round_trip(tmp_path, ending):
    trace = Trace.of(ROWS, SPEEDS)
    write_trace(trace, tmp_path / f"a.{ending}", tmp_path / f"b.{ending}")
    again = read_trace(tmp_path / f"a.{ending}", tmp_path / f"b.{ending}")
    assert (again.names, again.states, again.measured) == (trace.names, trace.states, trace.measured)
    for column in ("device", "state", "begin", "end", "speed", "bandwidth"):
        assert (getattr(again, column) == getattr(trace, column)).all()


def test_a_client_is_on_while_all_states_hold(files):
    devices = TraceDevices(path=files[0], shuffle=False)
    for time in np.linspace(0, 349.5, 700):
        on, until = devices.presence(np.arange(3), seed=0, time=float(time))
        assert on.tolist() == [is_on(name, time) for name in ("anna", "ben", "cem")]
        for client in range(3):
            later = np.arange(np.floor(time * 2) / 2 + 0.5, min(float(until[client]), time + 200), 0.5)
            steady = [devices.presence(np.array([client]), seed=0, time=float(t)).on[0] for t in later[:8]]
            assert all(now == on[client] for now in steady)
    on, until = devices.presence(np.array([2]), seed=0, time=0.0)
    assert not on[0] and until[0] == np.inf  # it never charges


def test_a_session_continues_when_the_trace_repeats(tmp_path):
    write_trace(Trace.of([("a", 0, 20, "on"), ("a", 80, 100, "on")]), tmp_path / "t.csv")
    on, until = TraceDevices(path=str(tmp_path / "t.csv")).presence(np.array([0]), seed=0, time=190.0)
    assert on[0] and until[0] == 220.0


def test_needed_states_can_be_chosen(files):
    devices = TraceDevices(path=files[0], shuffle=False, needs=("wifi",))
    assert devices.presence(np.arange(3), seed=0, time=15.0).on.tolist() == [True, True, True]
    with pytest.raises(ScenarioError, match="no state 'home'"):
        TraceDevices(path=files[0], needs=("home",)).presence(np.arange(3), seed=0, time=0.0)


def test_speeds_belong_to_the_device_by_name(files):
    devices = TraceDevices(path=files[0], speeds_path=files[1], shuffle=False)
    assert devices.speeds(np.arange(2), seed=0).tolist() == [20.0, 10.0]
    assert devices.bandwidths(np.arange(2), seed=0).tolist() == [500.0, 1000.0]
    assert devices.speeds(np.array([2]), seed=0)[0] in (10.0, 20.0)  # nobody has measured it
    assert TraceDevices(path=files[0]).speeds(np.arange(2), seed=0).tolist() == [100.0, 100.0]


def test_clients_draw_their_devices(files):
    devices = TraceDevices(path=files[0])
    on = devices.presence(np.arange(30_000), seed=0, time=50.0).on
    assert on.mean() == pytest.approx(2 / 3, abs=0.01)
    roster = OnlineDevices(devices, 3000, seed=0)
    for time in np.linspace(0, 500, 101):
        roster.advance(float(time))
        assert (roster.on == devices.presence(np.arange(3000), seed=0, time=float(time)).on).all()


def test_a_scenario_reads_a_trace(files):
    scenario = Scenario.from_dict({"devices": {"name": "trace", "path": files[0], "needs": ["wifi"]}})
    assert Scenario.from_dict(scenario.to_dict()) == scenario


def test_a_path_works_from_any_folder(files, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    devices = TraceDevices(path="trace.csv", speeds_path="speeds.csv")
    monkeypatch.chdir("/")
    assert devices.speeds(np.arange(9), seed=0).min() > 0 and devices.path == files[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("client,from,to\n1,0,5\n", "no column 'state'"),
        ("client,from,to,state\n", "no column 'client'"),
        ("client,from,to,state\n1,0,x,on\n", "numbers"),
        ("client,from,to,state\n1,9,5,on\n", "to a later moment"),
        ("client,from,to,state\n1,-9,5,on\n", "to a later moment"),
        ("client,from,to,state\n1,0,nan,on\n", "to a later moment"),
    ],
)
def test_a_broken_file_is_an_error(tmp_path, text, words):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ScenarioError, match=words):
        read_trace(tmp_path / "t.csv")
    with pytest.raises(ScenarioError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")


# -- published formats ----------------------------------------------------------------------------------------------


def test_fedscale(tmp_path):
    behaviour = {
        1: {"duration": 30, "active": [5, 50], "inactive": [25, 60], "finish_time": 518400, "model": "CPH1801"},
        2: {"duration": 30, "active": [0], "inactive": [70], "finish_time": 518400, "model": "x"},
    }
    capacity = {1: {"computation": 100.0, "communication": 800.0}, 9: {"computation": 50.0, "communication": 8.0}}
    for name, content in (("behave", behaviour), ("capacity", capacity)):
        (tmp_path / name).write_bytes(pickle.dumps(content))
    trace = FORMATS["fedscale"](tmp_path / "behave", tmp_path / "capacity")
    assert trace.names == ("1", "2") and trace.measured == ("1", "9")
    assert trace.begin.tolist() == [5, 50, 0] and trace.end.tolist() == [25, 60, 70]
    assert trace.speed == pytest.approx([1000 / 300, 1000 / 150])
    assert trace.bandwidth == pytest.approx([800 * 1024 / 8, 8 * 1024 / 8])


class Bomb:
    def __reduce__(self):
        return print, ("boom",)


@pytest.mark.parametrize(
    "content", [Bomb(), {1: Bomb()}, {1: Fraction(1, 2)}, {1: np.float64(3)}, [1], {1: {"active": [1]}}, {1: 3}]
)
def test_a_pickle_that_holds_more_than_numbers_is_not_executed(tmp_path, capsys, content):
    (tmp_path / "behave").write_bytes(pickle.dumps(content))
    with pytest.raises(ScenarioError):
        FORMATS["fedscale"](tmp_path / "behave", None)
    assert "boom" not in capsys.readouterr().out


def test_bytes_that_are_not_a_pickle(tmp_path):
    draw = np.random.default_rng(0)
    whole = pickle.dumps({1: {"active": [1], "inactive": [2]}})
    for _ in range(300):
        damaged = bytearray(whole[: draw.integers(1, len(whole))])
        damaged[draw.integers(len(damaged))] = draw.integers(256)
        (tmp_path / "behave").write_bytes(bytes(damaged))
        with pytest.raises(ScenarioError):
            FORMATS["fedscale"](tmp_path / "behave", None)


def test_flash(tmp_path):
    messages = [
        "2020-01-30 00:10:00\tbattery_charged_on",
        "2020-01-30 00:05:00\tScreen_Lock",  # lines may be out of order
        "2020-01-30 00:12:00\tWIFI",
        "2020-01-30 00:13:00\t87.0%",
        "no message at all",
        "2020-01-30 00:20:00\tscreen_off",
        "2020-01-30 00:30:00\tscreen_unlock",  # still dark
        "2020-01-30 00:40:00\tscreen_on",
        "2020-01-30 00:45:00\t4G",
        "2020-01-30 01:00:00\tbattery_charged_off",
    ]
    content = {"0": {"guid": 7, "messages": "\n".join(messages)}, "1": {"messages": "2020-01-31 00:00:00\twifi"}}
    (tmp_path / "state_traces.json").write_text(json.dumps(content))
    trace = FORMATS["flash"](tmp_path / "state_traces.json", None)
    intervals = {trace.states[s]: (a / 60, b / 60) for s, a, b in zip(trace.state, trace.begin, trace.end, strict=True)}
    assert intervals == {"charging": (10, 60), "wifi": (12, 45), "idle": (5, 40)}
    (session,) = zip(trace.sessions().begin, trace.sessions().end, strict=True)
    assert session == (12 * 60, 40 * 60)


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"0": 3}', '{"0": {"messages": "x"}}', "{" * 100_000])
def test_a_broken_flash_file_is_an_error(tmp_path, text):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ScenarioError):
        FORMATS["flash"](tmp_path / "t.json", None)


# -- fitting --------------------------------------------------------------------------------------------------------


def recorded(devices: DrawnDevices, clients: int, days: float) -> Trace:
    """Return a trace recorded from drawn devices."""
    until, time = days * 86400.0, np.zeros(clients)
    rows = []
    (state,) = devices.states.values()
    sessions = Sessions(**state)
    while (time < until).any():
        on, change = sessions.at(np.arange(clients), "online", seed=5, time=time)
        rows += [(str(c), time[c], min(change[c], until), "on") for c in np.flatnonzero(on & (time < until))]
        time = change
    speeds = zip(
        devices.speeds(np.arange(clients), seed=5), devices.bandwidths(np.arange(clients), seed=5), strict=True
    )
    return Trace.of(rows, [(str(c), *pair) for c, pair in enumerate(speeds)])


@pytest.mark.parametrize("daily", [0.0, 0.9])
def test_a_generator_is_fitted_to_a_trace(daily):
    state = {"session": 1500.0, "gap": 9000.0, "spread": 0.6, "variety": 0.4, "daily": daily, "peak": 21.0}
    truth = DrawnDevices(states={"online": state}, speed=40.0, speed_spread=0.5, bandwidth=3e5, bandwidth_spread=0.9)
    fitted = fit(recorded(truth, 400, 14))
    assert fitted.states is not None
    guess = fitted.states["online"]
    assert guess["session"] == pytest.approx(1500, rel=0.05)
    assert guess["gap"] == pytest.approx(9000, rel=0.08)
    assert guess["spread"] == pytest.approx(0.6, abs=0.05)
    assert guess["variety"] == pytest.approx(0.4, abs=0.08)
    assert guess["daily"] == pytest.approx(daily, abs=0.06)
    if daily:
        assert abs((guess["peak"] - 21 + 12) % 24 - 12) < 0.3
    assert (fitted.speed, fitted.speed_spread) == (pytest.approx(40, rel=0.1), pytest.approx(0.5, rel=0.1))
    assert (fitted.bandwidth, fitted.bandwidth_spread) == (pytest.approx(3e5, rel=0.15), pytest.approx(0.9, rel=0.1))
    everybody, times = np.arange(2000), np.linspace(0, 7 * 86400, 50)
    shares = [np.mean([d.presence(everybody, seed=1, time=t).on.mean() for t in times]) for d in (truth, fitted)]
    assert shares[1] == pytest.approx(shares[0], rel=0.06)


# -- small files that claim much ------------------------------------------------------------------------------------


def parquet(path, rows, client="a"):
    """Write the same row many times; a million rows take some kilobytes."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow.parquet import ParquetWriter

    text = pa.dictionary(pa.int32(), pa.string())
    schema = pa.schema([("client", text), ("from", pa.float64()), ("to", pa.float64()), ("state", text)])
    with ParquetWriter(path, schema, compression="zstd", store_schema=False) as file:
        for begin in range(0, rows, 1_000_000):
            now = min(rows - begin, 1_000_000)
            same = np.zeros(now, np.int32)
            words = [pa.DictionaryArray.from_arrays(same, [word]) for word in (client, "on")]
            file.write_table(pa.table([words[0], same.astype(float), same + 1.0, words[1]], schema))
    return path


def test_a_trace_with_too_many_rows_is_refused_before_it_is_read(tmp_path):
    path = parquet(tmp_path / "t.parquet", 12_000_000)
    assert path.stat().st_size < 1_000_000
    with pytest.raises(ScenarioError, match=r"t.parquet has 12,000,000 rows. At most 10,000,000") as caught:
        read_trace(path)
    assert "fewer" in str(caught.value.hint)
    (tmp_path / "t.csv").write_text("client,from,to,state\n" + "\n" * 10_000_001)
    with pytest.raises(ScenarioError, match="has 10,000,001 rows"):
        read_trace(tmp_path / "t.csv")


def test_a_long_text_in_every_row_is_read_once(tmp_path):
    """Two million times a text of a megabyte would be two terabytes."""
    trace = read_trace(parquet(tmp_path / "t.parquet", 2_000_000, client="a" * 1_000_000))
    assert len(trace.begin) == 2_000_000 and trace.names == ("a" * 1_000_000,)


def test_a_pickle_that_names_one_list_for_every_device_is_refused(tmp_path):
    times = [float(i) for i in range(20_000)]
    devices = {i: {"active": times, "inactive": times} for i in range(100_000)}
    (tmp_path / "trace").write_bytes(pickle.dumps(devices))
    with pytest.raises(ScenarioError, match=r"rows. At most 10,000,000"):
        FORMATS["fedscale"](tmp_path / "trace", None)


@pytest.mark.parametrize("end", ["1e300", "2e10", "inf"])
def test_an_interval_that_lasts_for_ever_is_refused(tmp_path, end):
    (tmp_path / "t.csv").write_text(f"client,from,to,state\nanna,5,{end},on\n")
    with pytest.raises(ScenarioError, match=r"at most 1e\+10. Got 5 to .* 'anna'") as caught:
        read_trace(tmp_path / "t.csv")
    assert "seconds" in str(caught.value.hint)


def test_clients_of_a_parquet_trace_may_be_numbers(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    table = {"client": [7, 8], "from": ["1", "2"], "to": [5, 6], "state": ["on", "on"], "remark": ["", ""]}
    write_table(pa.table(table), tmp_path / "t.parquet")
    trace = read_trace(tmp_path / "t.parquet")
    assert trace.names == ("7", "8") and trace.begin.tolist() == [1.0, 2.0]
    write_table(pa.table({**table, "to": ["x", None]}), tmp_path / "t.parquet")
    with pytest.raises(ScenarioError, match="'x'"):
        read_trace(tmp_path / "t.parquet")
