"""Trains a network that estimates the harvest of each tree; a thread renders a page with all errors for the growers.

"Since we have the live page, an epoch takes twice as long, and top still shows idle cores."
"""

import os
import tempfile
import threading
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
TREES = 12_000


def row_of(tree, error):
    colour = "red" if error > 1 else "orange" if error > 0.5 else "green"
    return f"<tr class={colour}><td>{tree:05d}</td><td>{error:8.3f}</td></tr>"


def rendered(errors):
    worst = sorted(range(len(errors)), key=lambda tree: -errors[tree])
    return "\n".join(row_of(tree, errors[tree]) for tree in worst)  # cause: gil-contention


def publish(errors, path, every):
    while True:
        time.sleep(every)
        page = rendered(list(errors))  # cause: gil-contention
        with open(path, "w") as file:
            file.write(page)


def main():
    torch.set_num_threads(1)
    errors = [0.0] * TREES
    page = os.path.join(tempfile.mkdtemp(), "page.html")
    threading.Thread(target=publish, args=(errors, page, 4.0 if CURED else 0.01), daemon=True).start()
    net = nn.Sequential(nn.Linear(40, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    trees = torch.randn(TREES, 40)
    harvest = trees[:, :5].sum(1).sin() + 2
    began, warm, step = time.perf_counter(), None, 0
    while True:
        rows = torch.randint(TREES, (512,))
        loss = (net(trees[rows]).squeeze(1) - harvest[rows]).abs()
        optimizer.zero_grad()
        loss.mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        for tree, error in zip(rows.tolist(), loss.tolist(), strict=True):
            errors[tree] = error
        step += 1
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
