"""Test vectors as JSON: what they say comes from the papers' formulas, and the selectors are compared with them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import fedcohort
from fedcohort.core.protocol import SELECTORS, Cohort, Losses
from fedcohort.core.selector_spec import describe
from fedcohort_bench.vectors.formulas import FORMULAS, Expected
from fedcohort_bench.vectors.world import COHORT, Draws, Ours, World, created, random_start

DATA = Path(__file__).parent / "data"
ROUNDS, DRAWS = 12, 400
_Z = 5.0  # standard deviations that a frequency may be away from its probability
# Twelve rounds are short. With these, they show the part of a method that its defaults put later. FedCor's 50 steps of
# Adam would turn a rounding error in its first embedding into 10% of a later score; 10 do not.
_PARAMETERS: dict[str, dict[str, Any]] = {
    "fedcor": {"warmup": 3, "interval": 4, "steps": 10},
    "neural-bandit": {"interval": 3},
    "oort": {"window": 3, "blacklist": 5},
    "oort-async": {"window": 3},
    "pyramidfl": {"window": 3, "blacklist": 5},
    "tifl": {"interval": 3},
}
_NOTES = {"tifl": ("tier",)}  # what was drawn and cannot be told from the cohort


def names() -> list[str]:
    """Return the selectors that have vectors: all that come with fedcohort."""
    return sorted(n for n in SELECTORS.names() if SELECTORS.get(n).__module__.startswith("fedcohort."))


def vector(name: str) -> dict[str, Any]:
    """Return the vector of a selector: the inputs of a run, and what its formula says about each round."""
    return expected_of(_played(name)[0])


def expected_of(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return a vector's inputs with what its formula says, which reads nothing else."""
    formula = FORMULAS[inputs["selector"]](inputs)
    rounds = [{**e, "expected": _plain(found)} for e, found in zip(inputs["rounds"], formula, strict=True)]
    return {**inputs, "rounds": rounds}


def _plain(found: Expected) -> dict[str, Any]:
    """Return JSON with nine digits, because sums round differently on other processors."""
    chance = found.chance
    always = found.always if chance is None else [c for c, p in chance.items() if p > 1 - 1e-9]
    possible = found.possible if chance is None else [c for c, p in chance.items() if p > 1e-9]

    def numbers(values: Mapping[int, float] | None) -> dict[str, float] | None:
        return None if values is None else {str(c): float(f"{values[c]:.9g}") for c in sorted(values)}

    return {
        "always": sorted(always),
        "possible": sorted(possible),
        "probabilities": None if chance is None else numbers({c: chance[c] for c in possible}),
        "draws": found.draws,
        "scores": numbers(found.scores),
        **{
            key: numbers(values)
            for key, values in (("asked", found.asked), ("weights", found.weights), ("work", found.work))
            if values is not None
        },
    }


def _played(name: str, draws: int = 0) -> tuple[dict[str, Any], list[tuple[Draws, dict[str, int]]]]:
    """Play a selector; return the inputs of its vector, and for each round ``draws`` choices and questions."""
    selector, world = created(name, **_PARAMETERS.get(name, {})), World()
    ours = Ours(selector, world)
    rounds, drawn = [], []
    for round_ in range(ROUNDS):
        first = ours.draws(round_, 1)
        query = first.query
        cohort, after = first.last
        played = cohort.clients.tolist()
        entry: dict[str, Any] = {"round": round_, "available": world.available(round_).tolist(), "size": COHORT}
        if isinstance(query, Losses):
            asked = query.clients.tolist()
            entry["question"] = {"asked": asked, "loss": world.losses(round_, query.clients).tolist()}
        elif query is not None:
            answer = world.answer(query, round_)
            assert answer is not None
            change = np.round(answer[query.answered_with], 9).tolist()
            entry["question"] = {"tried": [c.tolist() for c in query.cohorts], "loss_change": change}
        entry |= {"cohort": played, "reports": _reports(world, ours, round_, played)}
        if name in _NOTES:
            entry["notes"] = {key: cohort.notes[key] for key in _NOTES[name] if key in cohort.notes}
        rounds.append(entry)
        if draws:
            drawn.append((ours.draws(round_, draws, query), ours.asked(round_, draws if query else 0)))
        ours.learn(round_, played, after)
    inputs = {
        "format": 2,
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
    return inputs, drawn


def _reports(world: World, ours: Ours, round_: int, played: list[int]) -> list[dict[str, Any]]:
    """Return what the cohort reported: the plain numbers, and every other signal that the selector reads."""
    rows = world.results(round_, played)
    block = world.replies(Cohort(np.asarray(played, np.int64), round=round_, ticket=round_))
    for i, row in enumerate(rows):
        del row["test_accuracy"]  # nobody may read it
        row["kept"] = bool(block.kept[i])
        for signal in sorted(ours.now.selector.requires):
            if signal.is_metric and signal.name not in ("loss", "loss-rms", "duration"):
                row[signal.name] = block.metrics[signal.name][i].tolist()
    return rows


def write(folder: Path, selectors: list[str]) -> Iterator[Path]:
    """Write the vectors of some selectors, one file each, and yield the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in selectors:
        path = folder / f"{name}.json"
        path.write_text(_text(vector(name)), encoding="utf-8")
        yield path


def verify(folder: Path, selectors: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each selector, and where it does not do what its vector says; '' if it does."""
    for name in selectors:
        path = folder / f"{name}.json"
        if not path.is_file():
            yield name, f"{path} is missing"
            continue
        v = json.loads(path.read_text(encoding="utf-8"))
        inputs, drawn = _played(name, DRAWS)
        theirs = {**v, "rounds": [{k: x for k, x in entry.items() if k != "expected"} for entry in v["rounds"]]}
        problem = difference(theirs, json.loads(json.dumps(inputs)))
        for entry, (draws, asked) in zip(v["rounds"], drawn, strict=True):
            problem = problem or _against(entry, draws, asked)
        yield name, problem


def _against(entry: dict[str, Any], drawn: Draws, asked: dict[str, int]) -> str:
    """Return where a selector's draws are not what a round of its vector says, in words."""
    expected, place = entry["expected"], f"rounds[{entry['round']}]"
    seen = {str(c): float(share) for c, share in enumerate(drawn.included) if share}
    if expected["probabilities"] is None:
        if wrong := sorted({int(c) for c in seen} - set(expected["possible"])):
            return f"{place}: it picks client {wrong[0]}, which is not possible"
        if left := [c for c in expected["always"] if seen.get(str(c)) != 1]:
            return f"{place}: it does not always pick client {left[0]}"
    else:
        problem = _frequencies(seen, expected["probabilities"], expected["draws"], f"{place}: it picks")
        if problem:
            return problem
    if "asked" in expected:
        shares = {c: n / DRAWS for c, n in asked.items()}
        if problem := _frequencies(shares, expected["asked"], None, f"{place}: it asks"):
            return problem
    cohort = drawn.last[0]
    for key, values in (
        ("scores", drawn.score),
        ("weights", _by_client(cohort, cohort.weights)),
        ("work", _by_client(cohort, cohort.work)),
    ):
        if expected.get(key) is not None:
            got = {str(c): x for c, x in (values or {}).items()}
            if problem := difference(expected[key], got, f"{place}.{key}"):
                return problem
    return ""


def _by_client(cohort: Cohort, values: Any) -> dict[int, float] | None:
    return None if values is None else dict(zip(cohort.clients.tolist(), values.tolist(), strict=True))


def _frequencies(seen: Mapping[str, float], chance: Mapping[str, float], draws: int | None, what: str) -> str:
    for c in sorted({*seen, *chance}, key=int):
        share, p = seen.get(c, 0.0), chance.get(c, 0.0)
        # A rare choice may be among these draws and not among the formula's.
        q = p if draws is None else (p * draws + 1) / (draws + 2)
        spread = np.sqrt(q * (1 - q) * (1 / DRAWS + (1 / draws if draws else 0.0)))
        if abs(share - p) > _Z * spread + 1e-9:
            return f"{what} client {c} in {share:.1%} of {DRAWS} draws, expected {p:.1%}"
    return ""


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
