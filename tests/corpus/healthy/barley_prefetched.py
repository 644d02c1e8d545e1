"""Trains a classifier of barley fields; a thread reads the next batches, and another one writes how it goes.

"Somebody said that threads do not work in Python, so I should rewrite the loading with processes."
"""

import json
import os
import queue
import tempfile
import threading
import time
import zlib

import numpy as np
import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
FILES, FIELDS = 24, 64


def write_files(directory):
    rng = np.random.default_rng(0)
    for number in range(FILES):
        fields = rng.integers(0, 6, (FIELDS, 4, 32, 32), dtype=np.uint8)
        with open(os.path.join(directory, f"{number}.z"), "wb") as file:
            file.write(zlib.compress(fields.tobytes(), 1))


def read_ahead(directory, batches):
    number = 0
    while True:
        with open(os.path.join(directory, f"{number % FILES}.z"), "rb") as file:
            fields = np.frombuffer(zlib.decompress(file.read()), np.uint8).reshape(FIELDS, 4, 32, 32)
        batches.put(torch.from_numpy(fields.astype(np.float32) / 6))
        number += 1


def report(state, path):
    with open(path, "a") as file:
        while True:
            time.sleep(0.5)
            file.write(json.dumps(state) + "\n")
            file.flush()


def main():
    torch.set_num_threads(1)
    directory = tempfile.mkdtemp()
    write_files(directory)
    batches, state = queue.Queue(4), {"step": 0}
    threading.Thread(target=read_ahead, args=(directory, batches), daemon=True).start()
    threading.Thread(target=report, args=(state, os.path.join(directory, "log.jsonl")), daemon=True).start()
    net = nn.Sequential(
        nn.Conv2d(4, 24, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(24, 32, 3), nn.ReLU(),
        nn.Flatten(), nn.Linear(5408, 6),
    )  # fmt: skip
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    began, warm = time.perf_counter(), None
    while True:
        fields = batches.get()
        kinds = fields.mean((1, 2, 3)).mul(600).long() % 6
        loss = nn.functional.cross_entropy(net(fields), kinds)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state["step"] += 1
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = state["step"], now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (state['step'] - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
