"""FedCor through a session, against its steps written out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from fedcohort import ClientTable, LabelCounts, Losses, Session, Signal, Status, Trial, create
from fedcohort.core.errors import ParameterError
from fedcohort.core.protocol import Answer, RoundReport, RoundRequest
from fedcohort.selectors.numerics.class_balance import qcid
from fedcohort.selectors.papers.fedcor import FedCor, process


class Federation:
    """Clients with one class each, whose losses fall when their class is trained and rise when it is not."""

    def __init__(self, clients=30, classes=5, seed=0):
        self.rng = np.random.default_rng(seed)
        self.kinds = np.arange(clients) % classes
        self.classes = classes
        self.losses = 2.0 + 0.1 * self.rng.normal(size=clients)
        self.asked = []

    @property
    def labels(self):
        return LabelCounts(100 * np.eye(self.classes)[self.kinds])

    def change(self, cohort):
        share = np.bincount(self.kinds[cohort], minlength=self.classes) / len(cohort)
        drop = 0.3 * np.sqrt(share) - 0.05
        return -drop[self.kinds] + 0.005 * self.rng.normal(size=len(self.losses))

    def answer(self, query):
        self.asked.append(type(query).__name__)
        match query:
            case None:
                return None
            case Losses(clients=clients):
                return Answer(query, {Signal.LOSS: self.losses[clients]})
            case Trial(cohorts=cohorts):
                return Answer(query, {Signal.LOSS_CHANGE: np.stack([self.change(c) for c in cohorts])})

    def play(self, session, rounds, size=5, available=None):
        cohorts = []
        for _ in range(rounds):
            request = RoundRequest(size=size, available=None if available is None else available(self.rng))
            cohort = session.ask(request, self.answer(session.query(request)))
            self.losses = self.losses + self.change(cohort.clients)
            session.tell(RoundReport(cohort.ticket, cohort.clients))
            cohorts.append(cohort)
        return cohorts


def session_of(selector, federation, seed=1):
    return Session(selector, ClientTable(labels=federation.labels), seed=seed)


def test_questions_come_when_the_paper_asks_them():
    federation = Federation()
    federation.play(session_of(FedCor(warmup=3, interval=5), federation), 13)
    # losses before rounds 0 to 2 and once after; then trials at t % 5 == 0
    assert federation.asked == ["Losses"] * 4 + ["NoneType", "Trial"] + ["NoneType"] * 4 + ["Trial"] + ["NoneType"] * 2


def test_questions_around_rounds_that_are_samples():
    federation = Federation()
    cohorts = federation.play(session_of(FedCor(warmup=3, interval=5, samples="round"), federation), 12)
    wanted = ["Losses"] * 4 + ["NoneType"] + ["Losses"] * 2 + ["NoneType"] * 3 + ["Losses"] * 2
    assert federation.asked == wanted
    phases = [cohort.notes["phase"] for cohort in cohorts]
    assert phases == ["warm-up"] * 3 + ["process"] * 2 + ["sample"] + ["process"] * 4 + ["sample", "process"]


def test_a_trial_that_falls_on_the_end_of_warm_up_is_left_out():
    federation = Federation()
    federation.play(session_of(FedCor(warmup=4, interval=4), federation), 9)
    assert federation.asked == ["Losses"] * 5 + ["NoneType"] * 3 + ["Trial"]


def test_without_warm_up_the_first_round_is_a_trial():
    federation = Federation()
    cohorts = federation.play(session_of(FedCor(warmup=0, interval=3, trials=2), federation), 4)
    assert federation.asked == ["Trial", "NoneType", "NoneType", "Trial"]
    assert {cohort.notes["phase"] for cohort in cohorts} == {"process"}


@pytest.mark.parametrize(
    ("parameters", "signals"),
    [
        ({}, {"sizes", "loss-query", "trial-query"}),
        ({"samples": "round"}, {"sizes", "loss-query"}),
        ({"interval": None}, {"sizes", "loss-query"}),
        ({"warmup": 0}, {"sizes", "trial-query"}),
        ({"warmup": 0, "interval": None}, {"sizes"}),
    ],
)
def test_it_requires_only_what_it_will_ask(parameters, signals):
    assert {signal.name for signal in FedCor(**parameters).requires} == signals


def test_fits_use_the_papers_samples_and_weights():
    """Eq. 17 by hand: M = 2 old samples in warm-up and 1 after, each weighing theta per round it is older."""
    federation = Federation(clients=8, classes=2)
    selector = FedCor(warmup=4, interval=3, dimension=3, old_warmup=2, old=1, discount=0.8, steps=7)
    session = session_of(selector, federation)
    x = session.state.embedding
    options = {"noise": selector.noise, "learning_rate": selector.learning_rate, "steps": 7}
    changes, taken = [], []
    before = None
    for t in range(10):
        request = RoundRequest(size=3)
        query = session.query(request)
        answer = federation.answer(query)
        if isinstance(query, Losses):
            if before is not None:
                changes.append(federation.losses - before)
                taken.append(t - 1)
            before = federation.losses if t < 4 else None
        elif isinstance(query, Trial):
            changes.append(answer[Signal.LOSS_CHANGE][0])
            taken.append(t)
        if query is not None and changes:
            used = 3 if t <= 4 else 2
            recent = np.array(taken[-used:])
            weights = 0.8 ** (recent[-1] - recent)
            x = process.fit_embedding(x, np.stack(changes[-used:], axis=1), weights, **options)
        cohort = session.ask(request, answer)
        assert np.allclose(session.state.embedding, x, rtol=1e-10, atol=1e-12)
        federation.losses = federation.losses + federation.change(cohort.clients)
        session.tell(RoundReport(cohort.ticket, cohort.clients))
    assert taken == [0, 1, 2, 3, 6, 9]


def test_several_trials_count_as_one_sampling_round():
    federation = Federation(clients=6, classes=2)
    selector = FedCor(warmup=0, interval=1, trials=3, old=1, old_warmup=0, dimension=2, steps=3, discount=0.5)
    session = session_of(selector, federation)
    federation.play(session, 1, size=2)
    first, x = session.state.changes.copy(), session.state.embedding
    federation.play(session, 1, size=2)
    changes = session.state.changes
    assert changes.shape == (6, 6)
    assert np.array_equal(changes[:, :3], first[:, :3])
    weights = np.array([0.5] * 3 + [1.0] * 3)
    wanted = process.fit_embedding(x, changes, weights, noise=0.01, learning_rate=0.01, steps=3)
    assert np.allclose(session.state.embedding, wanted)


def test_choice_is_algorithm_1_on_the_available_clients():
    """The dense N x N posterior over all clients, picking among those available."""
    federation = Federation(clients=40, classes=6)
    selector = FedCor(warmup=3, interval=6)

    def some(rng):
        return np.sort(rng.choice(40, 17, replace=False))

    session = session_of(selector, federation)
    checked = 0
    for t in range(14):
        request = RoundRequest(size=6, available=some(federation.rng))
        answer = federation.answer(session.query(request))
        alpha = selector.annealing ** np.asarray(session.state.picks)
        cohort = session.ask(request, answer)
        if cohort.notes["phase"] == "process":
            x = session.state.embedding
            if answer is not None:
                alpha = np.ones(40)  # the fit has reset it
            covariance, p = x @ x.T, np.full(40, 1 / 40)
            left, picked = list(request.available), []
            for _ in range(6):
                sigma = np.sqrt(np.diag(covariance))
                drop = alpha * (p @ covariance) * sigma / (sigma**2 + selector.noise**2)
                best = max(left, key=lambda k, drop=drop: drop[k])
                column = covariance[:, best].copy()
                covariance = covariance - np.outer(column, column) / (column[best] + selector.noise**2)
                picked.append(int(best))
                left.remove(best)
            assert cohort.clients.tolist() == picked
            checked += 1
        assert set(cohort.clients.tolist()) <= set(request.available.tolist())
        federation.losses = federation.losses + federation.change(cohort.clients)
        session.tell(RoundReport(cohort.ticket, cohort.clients))
        assert session.round == t + 1
    assert checked == 11


def test_annealing_counts_selections_and_starts_again_with_every_fit():
    federation = Federation()
    session = session_of(FedCor(warmup=2, interval=4), federation)
    federation.play(session, 3)  # round 2 is the first that is picked, after the last fit of warm-up
    assert session.state.picks.sum() == 5
    federation.play(session, 1)
    assert session.state.picks.sum() == 10
    cohort = federation.play(session, 1)[0]  # round 4 begins with a trial and a fit
    assert session.state.picks.sum() == 5
    assert (session.state.picks[cohort.clients] == 1).all()


def test_clients_that_fail_are_annealed_too():
    federation = Federation()
    session = session_of(FedCor(warmup=1, interval=None, annealing=0.5), federation)
    federation.play(session, 1)
    request = RoundRequest(size=5)
    cohort = session.ask(request, federation.answer(session.query(request)))
    session.tell(RoundReport(cohort.ticket, cohort.clients, status=[Status.FAILED] * 5))
    assert (session.state.picks[cohort.clients] == 1).all()


def test_parts_add_up_to_the_expected_drop():
    federation = Federation()
    session = session_of(FedCor(warmup=4, interval=None, scale=1.7, annealing=0.7), federation)
    for cohort in federation.play(session, 8)[4:]:
        assert np.allclose(sum(cohort.parts.values()), cohort.score, rtol=1e-9, atol=1e-12)
        assert (cohort.parts["own"] >= 0).all()
        first = int(cohort.clients[0])
        assert cohort.parts["redundancy"][first] == pytest.approx(0.0, abs=1e-12)
        others = np.delete(np.arange(30), cohort.clients)
        assert (cohort.score[others] <= cohort.score[cohort.clients[-1]] + 1e-12).all()
        assert cohort.notes["expected drop"] == pytest.approx(cohort.score[cohort.clients].sum())


def test_a_round_that_changed_nothing_is_no_sample():
    federation = Federation()
    session = session_of(FedCor(warmup=5), federation)
    for failed in (True, False, True, False):
        request = RoundRequest(size=5)
        cohort = session.ask(request, federation.answer(session.query(request)))
        if failed:
            session.tell(RoundReport(cohort.ticket, cohort.clients, status=[Status.LATE] * 5))
        else:
            federation.losses = federation.losses + federation.change(cohort.clients)
            session.tell(RoundReport(cohort.ticket, cohort.clients))
    assert session.state.samples == 1
    assert session.state.taken[:2].tolist() == [1, -1]


def test_clients_that_do_not_answer_are_left_out_of_the_sample():
    federation = Federation()
    session = session_of(FedCor(warmup=2, interval=3), federation)
    start = session.state.embedding
    for _ in range(5):
        request = RoundRequest(size=5)
        query = session.query(request)
        answer = federation.answer(query)
        if answer is not None:
            values = {signal: np.array(value) for signal, value in answer.values.items()}
            for value in values.values():
                value[..., 7] = np.nan
            answer = Answer(query, values)
        cohort = session.ask(request, answer)
        session.tell(RoundReport(cohort.ticket, cohort.clients))
    state = session.state
    assert state.samples == 3
    assert np.isnan(state.changes[7]).all()
    assert not np.isnan(np.delete(state.changes[:, :3], 7, axis=0)).any()
    assert np.array_equal(state.embedding[7], start[7])
    assert not np.array_equal(state.embedding[6], start[6])


def test_without_any_answer_cohorts_stay_uniform():
    federation = Federation()
    session = session_of(FedCor(warmup=2, interval=3), federation)
    for _ in range(8):
        request = RoundRequest(size=5)
        query = session.query(request)
        answer = None
        if isinstance(query, Losses):
            answer = Answer(query, {Signal.LOSS: np.full(len(query.clients), np.nan)})
        elif isinstance(query, Trial):
            answer = Answer(query, {Signal.LOSS_CHANGE: np.full((1, 30), np.nan)})
        cohort = session.ask(request, answer)
        session.tell(RoundReport(cohort.ticket, cohort.clients))
    assert session.state.samples == 0
    assert cohort.notes["phase"] == "no sample yet"


def test_only_candidates_are_asked_and_tried():
    federation = Federation()
    session = session_of(FedCor(warmup=1, interval=2, trials=3), federation)
    who = np.array([1, 4, 5, 9, 20, 21, 22])
    for _ in range(3):
        request = RoundRequest(size=5, available=who)
        query = session.query(request)
        if isinstance(query, Losses):
            assert query.clients.tolist() == who.tolist()
        elif isinstance(query, Trial):
            assert len(query.cohorts) == 3
            for cohort in query.cohorts:
                assert len(set(cohort.tolist())) == 5
                assert set(cohort.tolist()) <= set(who.tolist())
        cohort = session.ask(request, federation.answer(query))
        session.tell(RoundReport(cohort.ticket, cohort.clients))
    assert federation.asked == ["Losses", "Losses", "Trial"]


@pytest.mark.parametrize("samples", ["trial", "round"])
def test_it_learns_which_clients_belong_together(samples):
    """With five kinds of clients, cohorts of five come to hold one of each; embeddings of a kind point one way."""
    federation = Federation()
    session = session_of(FedCor(warmup=12, interval=10, samples=samples), federation)
    cohorts = federation.play(session, 40)
    picked = [qcid(federation.labels, c.clients) for c in cohorts if c.notes["phase"] == "process"]
    uniform = [qcid(federation.labels, c.clients) for c in cohorts if c.notes["phase"] != "process"]
    assert np.mean(picked) < 0.6 * np.mean(uniform)
    unit = session.state.embedding / np.linalg.norm(session.state.embedding, axis=1, keepdims=True)
    correlation = unit @ unit.T
    same = federation.kinds[:, None] == federation.kinds
    off = ~np.eye(30, dtype=bool)
    assert correlation[same & off].mean() > 0.2 + correlation[~same].mean()


def test_state_does_not_grow():
    federation = Federation(clients=10, classes=2)
    session = session_of(FedCor(warmup=3, interval=2, old_warmup=2, steps=1), federation)
    shapes = None
    for _ in range(30):
        federation.play(session, 1)
        found = {name: np.shape(value) for name, value in vars(session.state).items()}
        assert shapes in (None, found)
        shapes = found


@pytest.mark.parametrize("losses", [0.0, 1e30, "wild"])
def test_extreme_losses_keep_the_state_finite(losses):
    session = Session(FedCor(warmup=4, interval=2, steps=30), ClientTable(sizes=[1.0] * 8), seed=2)
    rng = np.random.default_rng(0)
    for _ in range(12):
        request = RoundRequest(size=3)
        query = session.query(request)
        answer = None
        if query is not None:
            shape = (1, 8) if isinstance(query, Trial) else (8,)
            value = rng.choice([0.0, 1e30, -1e300, 1e-300], shape) if losses == "wild" else np.full(shape, losses)
            signal = Signal.LOSS_CHANGE if isinstance(query, Trial) else Signal.LOSS
            answer = Answer(query, {signal: value})
        cohort = session.ask(request, answer)
        assert len(set(cohort.clients.tolist())) == 3
        assert cohort.score is None or np.isfinite(cohort.score).all()
        session.tell(RoundReport(cohort.ticket, cohort.clients))
    assert np.isfinite(session.state.embedding).all()


def test_annealing_that_underflows_leaves_finite_parts():
    federation = Federation(clients=5, classes=2)
    session = session_of(FedCor(warmup=2, interval=None, annealing=1e-200), federation)
    for cohort in federation.play(session, 8, size=3)[2:]:
        assert all(np.isfinite(part).all() for part in cohort.parts.values())


def test_edges():
    federation = Federation(clients=4, classes=2)
    session = session_of(FedCor(warmup=1, interval=2), federation)
    assert [c.size for c in federation.play(session, 5, size=4)] == [4] * 5
    session = session_of(FedCor(warmup=1, interval=2), federation)
    assert [c.size for c in federation.play(session, 5, size=1)] == [1] * 5
    session = session_of(FedCor(warmup=1, interval=2), federation)
    only = federation.play(session, 5, size=3, available=lambda rng: np.array([2]))
    assert [c.clients.tolist() for c in only] == [[2]] * 5
    empty = ClientTable(sizes=[0, 0, 0, 0])
    session = Session(FedCor(warmup=1, interval=2), empty, seed=0)
    assert [c.size for c in federation.play(session, 5, size=2)] == [2] * 5


def test_clients_that_join_start_as_small_as_the_others():
    federation = Federation(clients=10, classes=2)
    session = session_of(FedCor(warmup=3, interval=4), federation)
    federation.play(session, 4)
    before = session.state.embedding
    session.join(ClientTable(labels=LabelCounts(100 * np.eye(2)[[0, 1, 0]])))
    after = session.state.embedding
    assert np.array_equal(after[:10], before)
    assert np.sqrt(np.mean(after[10:] ** 2)) == pytest.approx(np.sqrt(np.mean(before**2)), rel=0.5)
    federation.kinds = np.append(federation.kinds, [0, 1, 0])
    federation.losses = np.append(federation.losses, [2.0] * 3)
    federation.play(session, 6)
    assert session.state.changes.shape[0] == 13
    assert not np.array_equal(session.state.embedding[10:], after[10:])


def test_it_is_resumed_in_the_middle_of_a_sample(tmp_path):
    """The losses measured before a round survive a restart."""
    traces = []
    for restart in (False, True):
        federation = Federation()
        path = tmp_path / f"journal-{restart}"
        session = Session(FedCor(warmup=3, interval=4), ClientTable(labels=federation.labels), seed=5, journal=path)
        trace = []
        for _ in range(9):
            trace += federation.play(session, 1)[0].clients.tolist()
            if restart:
                session.close()
                session = Session.open(path)
        session.close()
        traces.append(trace)
    assert traces[0] == traces[1]


def test_it_can_be_made_by_name_and_refuses_bad_parameters():
    assert create("fedcor", interval=None) == FedCor(interval=None)
    for bad in ({"annealing": 0.0}, {"discount": 1.5}, {"dimension": 0}, {"noise": 0.0}, {"samples": "none"}):
        with pytest.raises(ParameterError, match=next(iter(bad))):
            FedCor(**bad)
