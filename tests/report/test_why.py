"""Explanations: the journal's numbers, the same everywhere."""

from __future__ import annotations

import json
from contextlib import closing

import pytest

from fedcohort.core.errors import FedcohortError, InputError
from fedcohort.journal import read_journal
from fedcohort.report.account import read_account
from fedcohort.report.data import load_bundle
from fedcohort.report.why import as_json, explain, find_journal, report_explanations


def test_picked_and_nearly_picked_are_the_journals(experiment):
    path = find_journal(experiment, "fedcm-ts-s1")
    why = explain(path, 7, nearly=3)
    with closing(read_journal(path)) as journal:
        (row,) = journal.cohorts(round_=7)
        _, arrays, _ = journal.scores(row.ticket)[""]
    assert {r.client for r in why.picked} == set(row.clients.tolist())
    scores = dict(zip(arrays["client"].tolist(), arrays["score"].tolist(), strict=True))
    others = sorted((c for c in scores if c not in row.clients), key=lambda c: -scores[c])
    assert [r.client for r in why.nearly] == others[:3]
    assert why.parts == ["estimate", "exploration"]
    for r in (*why.picked, *why.nearly):
        assert r.score == pytest.approx(sum(r.parts.values()), rel=2e-4)  # parts have four digits
    assert why.total == 20


def test_one_client_and_its_shadows(experiment):
    path = find_journal(experiment, "fedcbs-s1")
    picked = explain(path, 3).picked[0].client
    found = as_json(explain(path, 3, str(picked)))
    assert found["was_picked"] is True and found["client"] == picked and found["status"] is not None
    assert found["asked"][0]["client"] == picked
    (shadow,) = found["shadows"]
    assert shadow["name"] == "uniform" and len(shadow["picked"]) == 5
    assert shadow["same"] == len(set(shadow["picked"]) & {row["name"] for row in found["picked"]})
    json.dumps(found, allow_nan=False)


def test_the_run_must_be_named_if_there_are_several(experiment):
    with pytest.raises(InputError, match="--run"):
        find_journal(experiment, None)
    with pytest.raises(InputError, match="did you mean 'fedcbs-s1'"):
        find_journal(experiment, "fedcbs-s11")
    direct = experiment / "journal" / "fedcbs-s1.sqlite"
    assert find_journal(direct, None) == direct == find_journal(experiment, "fedcbs-s1")
    with pytest.raises(InputError, match="another"):
        find_journal(direct, "uniform-s1")


def test_errors_say_what_is_missing(experiment, tmp_path):
    with pytest.raises(InputError, match="no experiment"):
        find_journal(tmp_path / "nothing", None)
    with pytest.raises(InputError, match="no journal"):
        find_journal(tmp_path, None)
    path = find_journal(experiment, "uniform-s1")
    with pytest.raises(FedcohortError, match="rounds 0 to 23"):
        explain(path, 99)
    with pytest.raises(FedcohortError, match="no client"):
        explain(path, 3, "999")


def test_the_report_explains_the_requested_rounds(experiment):
    setting = load_bundle([experiment]).settings[0]
    groups, warnings = report_explanations(setting, [13, 400])
    assert not warnings and [g["label"] for g in groups] == [g.label for g in setting.groups]
    for group in groups:
        assert [why["round"] for why in group["rounds"]] == [0, 3, 7, 10, 13, 16, 20, 23]


def test_a_simulated_run_ends_as_its_experiment_says(experiment):
    assert read_account(find_journal(experiment, "uniform-s1")).state == "finished"
