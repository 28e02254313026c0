"""The example of a host over plain HTTP: as it is, and with a client that sends whatever it likes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

# Cem's requests, before it fetches any work. Each is named, and refused with the status that stands beside it.
HOSTILE = """
import json, os, sys, time
from urllib.error import HTTPError
from urllib.request import Request, urlopen

url, token = sys.argv[1], os.environ["TOKEN"]

def call(path, token, body=None):
    headers = {} if token is None else {"Authorization": "Bearer " + token}
    data = json.dumps(body).encode() if isinstance(body, (dict, list)) else body
    try:
        with urlopen(Request(url + path, data, headers)) as answer:
            return answer.status, answer.read()
    except HTTPError as error:
        return error.code, b""

def attack(name, expected, *request):
    status, _ = call(*request)
    print("attack", name, status, expected, flush=True)

def result(**changes):
    return {"do": "train", "number": 0, "value": 1.0, **changes}

def work():
    while True:
        answer = json.loads(call("/work", token)[1])
        if answer:
            return answer
        time.sleep(0.02)

stranger = [
    ("no token", "/work", None),
    ("no token for a result", "/result", None, result()),
    ("an empty token", "/work", ""),
    ("a wrong token", "/work", "x" * len(token)),
    ("half a token", "/work", token[:-1]),
    ("a token of other letters", "/work", "\\u00e9" * 20),
    ("a name for a token", "/work?client=anna", "anna"),
    ("an empty body of a stranger", "/result", None, b""),
]
for name, *request in stranger:
    attack(name, 401, *request)
bodies = {
    "an empty body": b"",
    "no JSON": b"\\xff\\xfe{",
    "null": b"null",
    "a list": [],
    "an empty table": {},
    "a list as number": result(number=[0]),
    "a text as number": result(number="0"),
    "true as number": result(number=True),
    "a fraction as number": result(number=0.5),
    "a text as value": result(value="1.0"),
    "a list as value": result(value=[1.0]),
    "no value": result(value=None),
    "NaN": b'{"do": "train", "number": 0, "value": NaN}',
    "infinity": b'{"do": "train", "number": 0, "value": 1e999}',
    "a number no model has": result(value=1e300),
    "an unknown thing to do": result(do="delete"),
    "another client's name": result(client="anna"),
    "many brackets": b"[" * 5000,
}
for name, body in bodies.items():
    attack(name, 422, "/result", token, body)
attack("too long a body", 413, "/result", token, b"1" * 10_001)
for name, number in {"a ticket nobody has": 0, "a negative ticket": -1, "a huge ticket": 2**80}.items():
    attack(name, 409, "/result", token, result(number=number))

question = work()
number = question["number"]
attack("another question's number", 409, "/result", token, result(do="measure", number=number + 1))
attack("a model for an answer", 409, "/result", token, result(number=number))
attack("text as a measurement", 422, "/result", token, result(do="measure", number=number, value="much"))
# A loss that makes cem the first choice.
call("/result", token, result(do="measure", number=number, value=1e6))
attack("an answer sent twice", 409, "/result", token, result(do="measure", number=number, value=1e6))
while work()["do"] != "train":
    pass
print("attack work is taken and never answered", flush=True)
while True:  # questions neither
    call("/work", token)
    time.sleep(0.1)
"""
DRIVER = """
import sys
sys.path.insert(0, sys.argv[1])
import own_host

own_host.QUESTION_SECONDS = 0.5
own_host.CLIENT = f"import sys\\nexec({sys.argv[2]!r} if sys.argv[2] == '3' else {own_host.CLIENT!r})"
own_host.main()
"""


def run(*arguments: str | Path) -> str:
    source = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": source},
        check=False,
    )
    assert not done.returncode, done.stderr[-2000:]
    return done.stdout


def rounds_of(output: str) -> list[tuple[str, ...]]:
    return re.findall(r"round (\d): (\w+), (\w+); the model is (\S+)", output)


def test_the_example_over_http_runs_and_ends_by_itself() -> None:
    output = run(ROOT / "examples" / "own_host.py")
    rounds = rounds_of(output)
    assert [int(found[0]) for found in rounds] == [0, 1, 2, 3, 4], output
    model = 0.0
    targets = {"anna": 1.0, "ben": 2.0, "cem": 3.0}
    for _, *names, said in rounds:
        losses = {name: (model - target) ** 2 for name, target in targets.items()}
        assert sorted(losses[name] for name in names) == sorted(losses.values())[1:]
        model = sum((model + targets[name]) / 2 for name in names) / 2
        assert float(said) == pytest.approx(model, abs=0.006)


def test_no_request_of_a_stranger_or_of_a_client_ends_the_example_or_moves_its_model() -> None:
    output = run("-c", DRIVER, ROOT / "examples", HOSTILE)
    attacks = re.findall(r"attack (.+) (\d+) (\d+)\n", output)
    assert len(attacks) == 34 and "never answered" in output
    assert [(name, status) for name, status, expected in attacks if status != expected] == []
    rounds = rounds_of(output)
    assert [int(found[0]) for found in rounds] == [0, 1, 2, 3, 4], output
    assert "cem" in rounds[0]  # it was chosen, and did not answer
    assert [set(names) for _, *names, _ in rounds[1:]] == [{"anna", "ben"}] * 4
    assert 1.0 < float(rounds[-1][-1]) < 2.0
