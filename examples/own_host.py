"""Your own host over plain HTTP: a FastAPI server, three client processes, and fedcohort's rounds between them.

python examples/own_host.py

The server plays rounds with `fedcohort.hosts.play`: questions, deadline, journal and restarts are its business. A
host says who is online, sends, receives and averages. Clients only ever call the server, as they would from behind a
firewall: GET /work, POST /result. The model is one number, and a client pulls it towards its own.
"""

import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import uvicorn
from fastapi import FastAPI

import fedcohort as fc
from fedcohort.hosts import Aggregation, Host, Online, Policy, Reply, play

NAMES = ["anna", "ben", "cem"]


class HttpHost(Host):
    """Clients that fetch their work from this server and post what came of it."""

    def __init__(self):
        self.model = 0.0
        self.seen = {}  # by client, when it was last heard of
        self.work = {}  # by client, what it shall do next
        self.results = queue.Queue()
        self.app = FastAPI()
        self.app.get("/work")(self.next_work)
        self.app.post("/result")(self.take_result)

    def next_work(self, client: str) -> dict:
        """Return a client's next piece of work, or an empty table."""
        self.seen[client] = time.monotonic()
        return self.work.pop(client, {})

    def take_result(self, result: dict) -> None:
        """Take what a client posts."""
        self.results.put(result)

    def now(self):
        return time.monotonic()

    def online(self):
        return Online(sorted(name for name, at in self.seen.items() if time.monotonic() - at < 5))

    def send(self, cohort):
        for name in cohort.names:
            self.work[name] = {"do": "train", "ticket": cohort.ticket, "model": self.model}
        return {}  # everybody can fetch it

    def receive(self, until):
        try:
            found = [self.results.get(timeout=max(min(until - self.now(), 3600), 0.01))]
        except queue.Empty:
            return []
        while not self.results.empty():
            found.append(self.results.get())
        return [Reply(r["ticket"], r["client"], content=r["value"]) for r in found if r["do"] == "train"]

    def combine(self, round_):
        values = [reply.content for reply in round_.in_order()]
        kept = np.isfinite(np.array(values, float))
        error = round_.shortfall(int(kept.sum()))
        if not error:
            self.model = float(np.mean(np.array(values)[kept]))
        return Aggregation(kept, error=error)

    def answer(self, query, available):
        names = [NAMES[i] for i in query.clients]  # this selector asks for losses
        for name in names:
            self.work[name] = {"do": "measure", "ticket": -1, "model": self.model}
        found, end = {}, self.now() + 5
        while len(found) < len(names) and self.now() < end:
            result = self.results.get(timeout=5)
            found[result["client"]] = result["value"]
        return fc.Answer(query, {s: np.array([found.get(n, np.nan) for n in names]) for s in query.signals})

    def on_closed(self, round_, aggregation):
        print(f"round {round_.cohort.round}: {', '.join(round_.cohort.names)}; the model is {self.model:.2f}")


# What runs at a client needs no fedcohort: fetch work, do it, post the result.
CLIENT = """
import json, sys, time
from urllib.request import Request, urlopen

url, name, target = sys.argv[1], sys.argv[2], float(sys.argv[3])
while True:
    work = json.load(urlopen(f"{url}/work?client={name}"))
    if not work:
        time.sleep(0.05)
        continue
    value = (work["model"] + target) / 2 if work["do"] == "train" else (work["model"] - target) ** 2
    body = json.dumps({**work, "client": name, "value": value}).encode()
    urlopen(Request(f"{url}/result", body, {"Content-Type": "application/json"}))
"""


def main():
    host = HttpHost()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(host.app, port=port, log_level="error"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    url = f"http://127.0.0.1:{port}"
    clients = [
        subprocess.Popen([sys.executable, "-c", CLIENT, url, name, str(target)], stderr=subprocess.DEVNULL)
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
