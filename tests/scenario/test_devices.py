"""Devices in time: sessions against brute force, speeds, failures, online devices, and scenarios with devices."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fedcohort.core.errors import ParameterError
from fedcohort.core.protocol import Status
from fedcohort.scenario import Federation, Scenario
from fedcohort.scenario.devices import DrawnDevices, OnlineDevices, Sessions

DAY = 86400.0
PHONE = {"session": 2400.0, "gap": 5000.0, "spread": 0.7, "variety": 0.5, "daily": 0.8, "peak": 21.0, "zones": 5}


def timeline(sessions: Sessions, clients: int, until: float, seed: int = 1) -> list[list[tuple[float, float]]]:
    """Return every client's sessions, by going from one change to the next."""
    intervals: list[list[tuple[float, float]]] = [[] for _ in range(clients)]
    time = np.zeros(clients)
    while (time < until).any():
        on, change = sessions.at(np.arange(clients), "online", seed=seed, time=time)
        assert (change > time).all()
        for client in np.flatnonzero(on & (time < until)):
            intervals[client].append((time[client], change[client]))
        time = change
    return intervals


def test_presence_matches_the_timeline_at_any_time():
    sessions = Sessions(**PHONE)
    lines = timeline(sessions, 20, 3 * DAY)
    for time in np.random.default_rng(0).uniform(0, 3 * DAY, 300):
        on, until = sessions.at(np.arange(20), "online", seed=1, time=float(time))
        for client, mine in enumerate(lines):
            now = [(begin, end) for begin, end in mine if begin <= time < end]
            assert bool(now) == on[client]
            if now:
                assert until[client] == pytest.approx(now[0][1])


def test_means_match_the_parameters():
    lines = timeline(Sessions(session=600, gap=1800, spread=0.4), 150, 5 * DAY)
    whole = [mine[1:] for mine in lines]  # the first one may have begun before
    lengths = [end - begin for mine in whole for begin, end in mine]
    gaps = [after[0] - before[1] for mine in whole for before, after in itertools.pairwise(mine)]
    assert np.mean(lengths) == pytest.approx(600, rel=0.03)
    assert np.mean(gaps) == pytest.approx(1800, rel=0.03)
    assert np.std(np.log(lengths)) == pytest.approx(0.4, rel=0.1)


def test_variety_makes_some_clients_rare():
    everybody = np.arange(4000)
    shares = {}
    for variety in (0.0, 1.5):
        sessions = Sessions(session=600, gap=600, variety=variety)
        seen = [sessions.at(everybody, "online", seed=0, time=t).on for t in np.linspace(0, 10 * DAY, 60)]
        shares[variety] = np.mean(seen, axis=0)
    assert shares[1.5].std() > 2 * shares[0.0].std()


def test_day_and_night_by_time_zone():
    one = Sessions(session=900, gap=900, daily=1.0, peak=12.0)
    at = {hour: one.at(np.arange(5000), "online", seed=0, time=hour * 3600.0 + DAY).on.mean() for hour in (0, 12)}
    assert at[0] < 0.03 and at[12] == pytest.approx(0.5, abs=0.03)
    spread = Sessions(session=900, gap=900, daily=1.0, peak=12.0, zones=None)
    shares = [spread.at(np.arange(5000), "online", seed=0, time=h * 3600.0).on.mean() for h in range(24)]
    assert max(shares) - min(shares) < 0.06
    assert one.activity(np.array([12.0, 0.0, 6.0])) == pytest.approx([1.0, 0.0, 0.5])


def test_all_states_must_hold():
    states = {"online": PHONE, "charging": {"session": 20_000.0, "gap": 30_000.0}}
    devices = DrawnDevices(states=states)
    for time in (0.0, 12_345.6, 400_000.0):
        on, until = devices.presence(np.arange(500), seed=4, time=time)
        parts = [Sessions(**table).at(np.arange(500), name, seed=4, time=time) for name, table in states.items()]
        assert (on == (parts[0].on & parts[1].on)).all()
        assert (until[on] == np.minimum(parts[0].until, parts[1].until)[on]).all()
        later = devices.presence(np.arange(500), seed=4, time=time + 1e-3)
        calm = until > time + 1e-3
        assert (later.on[calm] == on[calm]).all()


def test_time_is_samples_by_speed_and_bytes_by_bandwidth():
    devices = DrawnDevices(speed=50, speed_spread=0.6, bandwidth=2e5, bandwidth_spread=1.0)
    clients = np.arange(20_000)
    speeds, bandwidths = devices.speeds(clients, seed=2), devices.bandwidths(clients, seed=2)
    assert np.median(speeds) == pytest.approx(50, rel=0.03)
    assert np.std(np.log(bandwidths)) == pytest.approx(1.0, rel=0.03)
    assert abs(np.corrcoef(np.log(speeds), np.log(bandwidths))[0, 1]) < 0.03
    pair = np.array([7, 3])
    assert devices.durations(pair, np.array([100.0, 200.0]), 1e6, seed=2) == pytest.approx(
        np.array([100.0, 200.0]) / speeds[pair] + 1e6 / bandwidths[pair]
    )


def test_work_fails_when_the_session_ends():
    devices = DrawnDevices(states={"online": PHONE})
    on, until = devices.presence(np.arange(300), seed=0, time=1000.0)
    needed = np.full(300, 1500.0)
    seconds, status = devices.work(np.arange(300), needed, seed=0, time=1000.0)
    left = np.where(on, until - 1000.0, 0.0)
    assert (status == np.where(left < 1500, Status.FAILED, Status.OK)).all()
    assert seconds == pytest.approx(np.minimum(left, 1500))
    assert 0 < (status == Status.OK).sum() < on.sum()


def test_online_devices_follow_presence():
    devices = DrawnDevices(states={"online": PHONE})
    roster = OnlineDevices(devices, 200, seed=9)
    time = 0.0
    for step in np.random.default_rng(1).exponential(40, 400):
        time += float(step)
        roster.advance(time)
        assert (roster.on == devices.presence(np.arange(200), seed=9, time=time).on).all()


def test_waiting_ends_when_a_client_is_on():
    devices = DrawnDevices(states={"online": {"session": 60.0, "gap": 6000.0}})
    roster = OnlineDevices(devices, 2, seed=0)
    time = roster.wait(0.0)
    assert roster.on.any()
    earlier = np.linspace(0, time * (1 - 1e-9), 500)
    assert not any(devices.presence(np.arange(2), seed=0, time=float(t)).on.any() for t in earlier)
    assert OnlineDevices(DrawnDevices(), 3, seed=0).wait(5.0) == 5.0


def test_a_million_clients_at_once():
    devices = DrawnDevices(states={"online": PHONE})
    on, _ = devices.presence(np.arange(1_000_000), seed=0, time=3e5)
    few = devices.presence(np.array([999_999, 17]), seed=0, time=3e5).on
    assert (few == on[[999_999, 17]]).all()


def test_a_scenario_has_devices():
    table = {"devices": {"speed": 20.0, "states": {"online": PHONE}}}
    scenario = Scenario.from_dict(table)
    assert Scenario.from_dict(scenario.to_dict()) == scenario
    assert "devices       drawn(" in scenario.describe() and "latency" not in scenario.describe()
    federation = Federation.of([[0]] * 50, labels=[0], classes=1)
    assert scenario.devices is not None
    expected = scenario.devices.presence(np.arange(50), seed=3, time=0.0).on
    assert (scenario.available(federation, seed=3, round=0) == expected).all()


def test_random_failures_are_added():
    scenario = Scenario(devices=DrawnDevices(speed=1.0), failure=0.5)
    events = scenario.timed_events(
        Federation.of([[0]] * 1000, labels=[0], classes=1),
        np.arange(1000),
        seed=0,
        ticket=3,
        time=0.0,
        samples=np.full(1000, 10.0),
        transfer=0.0,
    )
    failed = events.status == Status.FAILED
    assert 430 < failed.sum() < 570
    assert (events.durations[failed] < 10).all() and (events.durations[~failed] == 10).all()


def test_clients_with_rare_classes_can_be_slower_devices():
    scenario = Scenario(devices=DrawnDevices(speed=1.0), rare_slowness=3.0)
    federation = Federation.of([[0, 1, 2, 3]] * 9 + [[4, 4]], labels=[0, 0, 0, 0, 1], classes=2)
    events = scenario.timed_events(
        federation, np.array([0, 9]), seed=0, ticket=0, time=0.0, samples=np.full(2, 10.0), transfer=0.0
    )
    assert events.durations.tolist() == [10.0, 30.0]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"devices": "drawn", "latency": "shifted-exponential"}, "leave out latency"),
        ({"devices": {"states": {"online": {"lenght": 3}}}}, "a table of states"),
        ({"devices": {"states": {"online": {"session": -3}}}}, "a table of states"),
        ({"devices": 3}, "a name or a table"),
        ({"devices": {"sped": 3}}, "sped"),
    ],
)
def test_invalid_devices_are_an_error(table, words):
    with pytest.raises(ParameterError) as caught:
        Scenario.from_dict(table)
    assert words in str(caught.value)
