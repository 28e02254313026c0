"""Explanations: ranks that equal scores share, and how every selector picks."""

import io
import json
from dataclasses import dataclass, field

import numpy as np
import pytest
from rich.console import Console

from fedcohort import ClientTable, Cohort, Session
from fedcohort.cli.explain import score_table
from fedcohort.core.protocol import SELECTORS, RoundRequest
from fedcohort.report.why import as_json, explain
from fedcohort.selectors import Uniform
from fedcohort.session.explain import about_selector
from fedcohort.testing.host import ScriptedHost


@dataclass(frozen=True, kw_only=True)
class Given(Uniform):
    """Returns fixed scores and picks fixed clients."""

    scores: tuple = field(default=())
    picks: tuple = field(default=())

    def select(self, state, slate, answer, rng):
        scores = np.array(self.scores)[slate.candidates]
        chosen = np.array(sorted(self.picks))
        return Cohort(clients=chosen, candidates=slate.candidates, score=scores, parts={"luck": scores}), state


def asked(scores, picks, **session):
    made = Session(Given(scores=tuple(scores), picks=tuple(picks)), ClientTable(sizes=[1] * len(scores)), **session)
    made.ask(RoundRequest(size=len(picks)))
    return made


def test_ties_share_their_ranks_and_say_so():
    session = asked([0.5, 0.9, 0.5, 0.1, 0.5, 0.7], [1, 4])
    ranks = {row.client: (row.rank, row.last_rank) for row in session.explain(0).rows}
    assert ranks == {1: (1, 1), 5: (2, 2), 0: (3, 5), 2: (3, 5), 4: (3, 5), 3: (6, 6)}
    assert "was picked in round 0; it scored 0.5, rank 3-5 of 6, tied (luck 0.5)." in str(session.explain(0, 4))
    beaten = str(session.explain(0, 0))
    assert "was not picked in round 0; it scored 0.5, rank 3-5 of 6, tied (luck 0.5). The lowest score" in beaten
    assert "it scored 0.9, rank 1 of 6 (luck" in str(session.explain(0, 1))


@pytest.mark.parametrize("seed", range(20))
def test_ranks_against_counting(seed):
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 6, size=30).astype(float)
    scores[rng.random(30) < 0.1] = np.nan  # NaN ranks below all scores
    for row in asked(scores, [0, 1]).explain(0).rows:
        own = -np.inf if np.isnan(row.score) else row.score
        known = np.where(np.isnan(scores), -np.inf, scores)
        assert row.rank == 1 + (known > own).sum() and row.last_rank == (known >= own).sum()


def test_a_tie_that_goes_beyond_the_record_has_no_last_rank():
    scores = np.full(3000, 0.25)
    scores[:20] = 1.0
    scores[20:30] = np.linspace(0.9, 0.5, 10)
    scores[2999] = 0.0
    session = asked(scores, [3, 25, 2500, 2999])  # the last two are not among the 68 recorded best
    rows = {row.client: row for row in session.explain(0).rows}
    assert len(rows) == 70
    assert rows[3].place() == "1-20, tied"
    assert rows[25].place(of=3000) == "26 of 3000"
    assert rows[40].place() == rows[2500].place() == "31+, tied" and rows[40].last_rank is None
    assert rows[2999].rank is None and rows[2999].place() == ""
    assert "it scored 0.25, rank 31+ of 3000, tied" in str(session.explain(0, 2500))
    assert "it scored 0 (luck" in str(session.explain(0, 2999))


def test_many_different_scores_have_no_ties():
    rows = asked(np.arange(3000.0), [2999, 2998]).explain(0).rows
    assert [row.place() for row in rows] == [str(rank) for rank in range(1, 67)]


def test_terminal_and_json_show_the_shared_rank(tmp_path):
    path = tmp_path / "server.sqlite"
    asked([0.5, 0.9, 0.5, 0.1, 0.5, 0.7], [1, 4], journal=path).close()
    why = explain(path, 0)
    found = json.loads(json.dumps(as_json(why)))
    assert [(r["name"], r["rank"], r["last_rank"], r["place"]) for r in (*found["picked"], *found["nearly"])][:4] == [
        ("1", 1, 1, "1"),
        ("4", 3, 5, "3-5, tied"),
        ("5", 2, 2, "2"),
        ("0", 3, 5, "3-5, tied"),
    ]
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(score_table(why))
    assert console.export_text().count("3-5, tied") == 3


# -- how a selector picks ---------------------------------------------------------------------------------------------


def above_the_lowest(session, rounds):
    """Return explanations of clients that were not picked although their score is higher than that of a picked one."""
    found = []
    for round_ in range(rounds):
        whole = session.explain(round_)
        for row in whole.rows:
            if not row.picked and whole.threshold is not None and row.score > whole.threshold:
                found.append(session.explain(round_, row.client))
    return found


@pytest.mark.parametrize("name", sorted(SELECTORS.names()))
def test_every_selector_says_how_it_picks_and_what_the_parts_of_its_scores_are(name):
    host = ScriptedHost(n=24)
    selector = SELECTORS.get(name)(**({"of": "oort"} if name == "bounded" else {}))
    session = host.session(selector, seed=3)
    host.play(session, 20, size=4)
    parts = {part for round_ in range(20) for row in session.explain(round_).rows for part in row.parts}
    for round_ in (0, 19):
        found = session.explain(round_, 3)
        assert found.rule.endswith(".") and str(found).endswith(found.rule)
        assert parts <= set(found.meanings), parts - set(found.meanings)
        assert found.meanings.keys() <= parts | OPTIONAL.get(name, set())
    odd = above_the_lowest(session, 20)
    assert all("scores alone do not decide" in found.reason for found in odd)
    if odd and not found.rule.startswith("This choice was made without scores"):  # the rule says what else decides
        assert any(
            word in odd[0].rule for word in ("random", "turn", "come first", "client by client", "slower", "Each")
        )


OPTIONAL = {  # parts that appear with other parameters, or in other rounds
    "clustered": {"group"}, "balanced": {"speed", "had its share"}, "bounded": {"doubted"}, "fedacs": {"draw"},
}  # fmt: skip


def test_a_selector_that_picks_the_best_leaves_no_higher_score():
    host = ScriptedHost(n=24)
    session = host.session(SELECTORS.get("fedcm-ucb")(), seed=3)
    host.play(session, 10, size=4)
    assert above_the_lowest(session, 10) == []
    assert "scores alone" not in str(session.explain(9, 3)) and "highest scores are picked" in str(
        session.explain(9, 3)
    )


def test_reading_a_journal_imports_no_selector(tmp_path):
    evil = {"name": None, "class": "evil:Evil", "reference": f"{tmp_path}/evil.py:Evil", "params": {}}
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    assert about_selector(evil) == ("", {})
    assert about_selector(None) == ("", {}) and about_selector({"name": 7}) == ("", {})
    both, meanings = about_selector({"name": "bounded", "params": {"of": "oort"}})
    assert "had their share" in both and "never tried" in both and {"doubted", "staleness"} <= set(meanings)


def test_a_custom_selector_explains_itself(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom fedcohort.selectors import Uniform\n\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Mine(Uniform):\n    picks_by = 'By the moon.'\n"
    )
    session = Session(f"{tmp_path}/mine.py:Mine", clients=5)
    session.ask(2)
    assert str(session.explain(0, 1)).endswith("By the moon.")
