"""Your own host over plain HTTP: a FastAPI server, three client processes, and fedcohort's rounds between them.

python examples/own_host.py

The server plays rounds with `fedcohort.hosts.play`: deadline, journal and restarts are its business. A host says who
is online, sends, receives and averages. Clients only ever call the server, as they would from behind a firewall:
GET /work, POST /result. The model is one number, and a client pulls it towards its own.

Whoever can reach a server can send it anything. So each client proves with a token who it is, and what it posts counts
only if it answers what this client was asked, for the first time, with a number that can be one. Beyond one machine,
let uvicorn speak TLS (ssl_certfile, ssl_keyfile), or everybody between can read the tokens.
"""

import hmac
import os
import queue
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

import fedcohort as fc
from fedcohort.hosts import Aggregation, Host, Online, Policy, Reply, play

NAMES = ["anna", "ben", "cem"]
LONGEST = 10_000  # bytes of a request's body; a real model is larger
QUESTION_SECONDS = 2.0  # a client that has not answered a question by then does without


class Result(BaseModel):
    """What a client posts. Texts are not taken for numbers, and a number that no model can have is refused."""

    model_config = ConfigDict(strict=True, extra="forbid")
    do: Literal["train", "measure"]
    number: int
    value: Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]


class HttpHost(Host):
    """Clients that fetch their work from this server and post what came of it.

    Parameters
    ----------
    tokens : dict of str to str
        By client, what it must know.
    """

    def __init__(self, tokens):
        self.tokens = tokens
        self.model = 0.0
        self.seen = {}  # by client, when it was last heard of
        self.work = {}  # by client, what it shall do next; it stays until the client has answered it
        self.questions = 0
        self.models, self.losses = queue.Queue(), queue.Queue()
        # FastAPI's own pages would tell strangers what the server understands.
        self.app = FastAPI(openapi_url=None)
        self.app.get("/work")(self.next_work)
        self.app.post("/result")(self.take_result)

    # -- what clients call, in uvicorn's thread ------------------------------------------------------------------------

    def client_of(self, request):
        """Return whose token a request has."""
        token = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        for name, expected in self.tokens.items():
            # `==` would stop at the first wrong character, and its time would tell how many are right.
            if hmac.compare_digest(token, expected.encode()):
                self.seen[name] = time.monotonic()
                return name
        raise HTTPException(401, "no client has this token")

    async def next_work(self, request: Request) -> dict:
        """Return a client's work, or an empty table; asking again gives it again, because answers get lost."""
        return self.work.get(self.client_of(request), {})

    async def take_result(self, request: Request) -> None:
        """Take what a client posts, if it is the first answer to what this client was asked."""
        name = self.client_of(request)
        body = b""
        async for part in request.stream():  # FastAPI itself would read a body of any size
            body += part
            if len(body) > LONGEST:
                raise HTTPException(413, f"more than {LONGEST} bytes")
        try:
            result = Result.model_validate_json(body)
        except ValidationError as error:
            raise HTTPException(422, f"{error.error_count()} mistakes in the result") from error
        work = self.work.get(name, {})
        if (result.do, result.number) != (work.get("do"), work.get("number")):
            raise HTTPException(409, "nobody has asked this client for this")
        work.clear()  # this piece and no other: `play` may have put the next one in its place
        answers = self.models if result.do == "train" else self.losses
        answers.put((result.number, name, result.value))

    # -- what `play` calls ---------------------------------------------------------------------------------------------

    def now(self):
        return time.monotonic()

    def online(self):
        return Online(sorted(name for name, at in list(self.seen.items()) if time.monotonic() - at < 5))

    def send(self, cohort):
        for name in cohort.names:
            self.work[name] = {"do": "train", "number": cohort.ticket, "model": self.model}
        return {}  # everybody can fetch it

    def receive(self, until):
        found = self.arrived(self.models, until)
        return [Reply(ticket, name, content=value) for ticket, name, value in found]

    def arrived(self, answers, until):
        """Return the answers that have arrived; if there are none, wait for one until a time."""
        try:
            found = [answers.get(timeout=max(min(until - self.now(), 3600), 0.01))]
        except queue.Empty:
            return []
        while not answers.empty():
            found.append(answers.get())
        return found

    def combine(self, round_):
        values = [reply.content for reply in round_.in_order()]
        error = round_.shortfall(len(values))
        if not error:
            self.model = float(np.mean(values))
        return Aggregation(np.ones(len(values), bool), error=error)

    def answer(self, query, available):
        self.questions += 1  # so that a late answer to an earlier question is not taken for one to this
        names = [NAMES[i] for i in query.clients]  # this selector asks for losses
        for name in names:
            self.work[name] = {"do": "measure", "number": self.questions, "model": self.model}
        losses, end = {}, self.now() + QUESTION_SECONDS
        while len(losses) < len(names) and self.now() < end:
            for number, name, value in self.arrived(self.losses, end):
                if number == self.questions:
                    losses[name] = value
        return fc.Answer(query, {s: np.array([losses.get(n, np.nan) for n in names]) for s in query.signals})

    def on_closed(self, round_, aggregation):
        print(f"round {round_.cohort.round}: {', '.join(round_.cohort.names)}; the model is {self.model:.2f}")


# What runs at a client needs no fedcohort: fetch work, do it, post the result.
CLIENT = """
import json, os, sys, time
from urllib.error import HTTPError
from urllib.request import Request, urlopen

url, target = sys.argv[1], float(sys.argv[2])
headers = {"Authorization": "Bearer " + os.environ["TOKEN"]}
while True:
    work = json.load(urlopen(Request(url + "/work", headers=headers)))
    if not work:
        time.sleep(0.05)
        continue
    value = (work["model"] + target) / 2 if work["do"] == "train" else (work["model"] - target) ** 2
    result = {"do": work["do"], "number": work["number"], "value": value}
    try:
        urlopen(Request(url + "/result", json.dumps(result).encode(), headers))
    except HTTPError:  # the server has asked for something else in the meantime
        pass
"""


def main():
    # In earnest, each client gets its token once, by a way you trust, and the server keeps them in a file of its own.
    tokens = {name: secrets.token_urlsafe() for name in NAMES}
    host = HttpHost(tokens)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(host.app, port=port, log_level="error"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    url = f"http://127.0.0.1:{port}"
    # By the environment, because everybody on a machine can read a command line.
    clients = [
        subprocess.Popen(
            [sys.executable, "-c", CLIENT, url, str(target)],
            stderr=subprocess.DEVNULL,
            env={**os.environ, "TOKEN": tokens[name]},
        )
        for target, name in enumerate(NAMES, 1)
    ]
    try:
        with tempfile.TemporaryDirectory() as folder:
            journal = Path(folder) / "journal.sqlite"
            table = fc.ClientTable(names=NAMES, sizes=[100, 100, 100])
            with fc.Session("power-of-choice", table, seed=1, journal=journal) as session:
                play(host, session, Policy(size=2, deadline=5.0, wait_for=3, patience=30.0), rounds=5)
                print(session.explain(4))
    finally:
        for process in clients:
            process.terminate()


if __name__ == "__main__":
    main()
