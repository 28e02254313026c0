"""Writing test vectors as JSON, and comparing those on disk with what the selectors do now."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import fedcohort
from fedcohort.core.protocol import SELECTORS, Cohort, Losses
from fedcohort.core.selector_spec import describe
from fedcohort_bench.vectors.world import COHORT, Reference, World, created, random_start

DATA = Path(__file__).parent / "data"
ROUNDS, DRAWS = 12, 400
_SAME = 40  # a selector that makes one choice in so many draws is taken to have no other


def vector(name: str) -> dict[str, Any]:
    """Return the vector of a registered selector: a played run, and for each round what may be chosen in it."""
    selector, world = created(name), World()
    reference = Reference(selector, world)
    rounds = []
    for round_ in range(ROUNDS):
        first = reference.draws(round_, 1)
        query = first.query
        few = reference.draws(round_, _SAME, query)
        drawn = few if few.cohorts == 1 else reference.draws(round_, DRAWS, query)
        cohort, after = first.last
        played = cohort.clients.tolist()
        included = drawn.included.tolist()
        entry: dict[str, Any] = {
            "round": round_,
            "available": world.available(round_).tolist(),
            "size": COHORT,
            "expected": {
                "always": [c for c, p in enumerate(included) if p == 1],
                "possible": [c for c, p in enumerate(included) if p > 0],
                "probabilities": {str(c): round(p, 4) for c, p in enumerate(included) if p > 0},
                "draws": DRAWS if few.cohorts > 1 else "one choice only",
                "scores": None if drawn.score is None else {str(c): s for c, s in drawn.score.items()},
            },
            "cohort": played,
            "stop": cohort.stop,
            "reports": _reports(world, reference, round_, played),
        }
        if isinstance(query, Losses):
            asked = query.clients.tolist()
            entry["question"] = {"asked": asked, "loss": world.losses(round_, query.clients).tolist()}
        elif query is not None:
            answer = world.answer(query, round_)
            assert answer is not None
            cohorts = [c.tolist() for c in query.cohorts]
            entry["question"] = {"tried": cohorts, "loss_change": answer[query.answered_with].round(6).tolist()}
        rounds.append(entry)
        reference.learn(round_, played, after)
        if cohort.stop is not None:
            break
    return {
        "format": 1,
        "selector": name,
        "version": fedcohort.__version__,
        "parameters": describe(selector)["params"],
        "reads": sorted(signal.name for signal in selector.requires),
        "start": random_start(selector, world),
        "clients": world.n,
        "sizes": world.sizes.tolist(),
        "label_counts": world.facts["counts"].tolist(),
        "rounds": rounds,
    }


def _reports(world: World, reference: Reference, round_: int, played: list[int]) -> list[dict[str, Any]]:
    """Return what the cohort reported: the plain numbers, and every other signal that the selector reads."""
    rows = world.results(round_, played)
    if not played:
        return rows
    block = world.replies(Cohort(np.asarray(played, np.int64), round=round_, ticket=round_))
    for i, row in enumerate(rows):
        del row["test_accuracy"]  # nobody may read it
        row["kept"] = bool(block.kept[i])
        for signal in sorted(reference.now.selector.requires):
            if signal.is_metric and signal.name not in ("loss", "loss-rms", "duration"):
                row[signal.name] = np.round(block.metrics[signal.name][i], 6).tolist()
    return rows


def names() -> list[str]:
    """Return the selectors that have vectors: all that come with fedcohort."""
    return sorted(n for n in SELECTORS.names() if SELECTORS.get(n).__module__.startswith("fedcohort."))


def write(folder: Path, selectors: list[str]) -> Iterator[Path]:
    """Write the vectors of some selectors, one file each, and yield the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in selectors:
        path = folder / f"{name}.json"
        path.write_text(_text(vector(name)), encoding="utf-8")
        yield path


def verify(folder: Path, selectors: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each selector, and where its vector differs from what the selector does now; '' if it does not."""
    for name in selectors:
        path = folder / f"{name}.json"
        if not path.is_file():
            yield name, f"{path} is missing"
            continue
        yield name, difference(json.loads(path.read_text(encoding="utf-8")), json.loads(_text(vector(name))))


def difference(theirs: Any, ours: Any, place: str = "") -> str:
    """Return the first place where two vectors differ, in words; versions do not count."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        if theirs.keys() != ours.keys():
            return f"{place or 'the file'} has {sorted(theirs)}, expected {sorted(ours)}"
        pairs = [(f"{place}.{k}" if place else k, theirs[k], ours[k]) for k in ours if k != "version"]
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        pairs = [(f"{place}[{i}]", a, b) for i, (a, b) in enumerate(zip(theirs, ours, strict=True))]
    elif isinstance(theirs, float) and isinstance(ours, float):
        return "" if np.isclose(theirs, ours, rtol=1e-6, atol=1e-9) else f"{place} is {theirs}, expected {ours}"
    else:
        return "" if theirs == ours else f"{place} is {theirs}, expected {ours}"
    return next((found for p, a, b in pairs if (found := difference(a, b, p))), "")


def _text(content: dict[str, Any]) -> str:
    """One line for each round, which a person can read and git can compare."""
    *head, (_, rounds) = content.items()
    lines = [f' "{key}": {json.dumps(value, allow_nan=False)},' for key, value in head]
    played = ",\n".join("  " + json.dumps(entry) for entry in rounds)
    return "\n".join(["{", *lines, ' "rounds": [', played, " ]", "}"]) + "\n"
