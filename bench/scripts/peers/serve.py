"""One peer in its own environment: reads commands from stdin, a line of JSON each, and answers on stdout.

python serve.py ADAPTER JOB-FOLDER
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import time

import job as jobs
import numpy as np


def main() -> None:
    """Answer commands until told to stop."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps the framework's output out of the answers

    def answer(**values: object) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    torch = importlib.import_module("torch") if importlib.util.find_spec("torch") else None
    if importlib.util.find_spec("torchvision"):  # built for CUDA, it looks for missing operators when it is imported
        for operator in ("nms", "qnms"):
            torch.library.define(f"torchvision::{operator}", "(Tensor boxes, Tensor scores, float least) -> Tensor")
    began = time.perf_counter()
    peer = importlib.import_module(sys.argv[1]).Peer(jobs.read(sys.argv[2]))
    answer(ready=time.perf_counter() - began)
    for line in sys.stdin:
        command = json.loads(line)
        if "cohorts" in command:
            if torch is not None and "threads" in command:
                torch.set_num_threads(command["threads"])
            began = time.perf_counter(), jobs.processor_time()
            peer.rounds(command["cohorts"])
            began, ended = getattr(peer, "times", (began, (time.perf_counter(), jobs.processor_time())))
            answer(seconds=ended[0] - began[0], processor=ended[1] - began[1])
        elif "save" in command:
            if hasattr(peer, "accuracy"):
                answer(accuracy=peer.accuracy())
            else:
                np.savez(command["save"], **peer.parameters())
                answer(done=True)


if __name__ == "__main__":
    main()
