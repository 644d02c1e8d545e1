"""Reads carved glyphs with a small network; all in memory, a running mean of the weights, the loss is read rarely.

"It makes a hundred steps in a second. Is there nothing between them that takes time?"
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    glyphs = torch.randn(6_000, 784)
    letters = torch.randint(0, 24, (6_000,))
    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 24))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=True)
    weights = list(model.parameters())
    means = [weight.detach().clone() for weight in weights]
    total, hits = torch.zeros(()), torch.zeros(())
    began, warm, step, now = time.perf_counter(), None, 0, 0.0
    while now - began < SECONDS:
        for rows in torch.randperm(6_000).split(600):
            truth = letters[rows]
            logits = model(glyphs[rows])
            loss = nn.functional.cross_entropy(logits, truth)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                total += loss
                hits += (logits.argmax(1) == truth).sum()
                if step % 10 == 0:
                    torch._foreach_lerp_(means, weights, 0.02)
            step += 1
            if step % 500 == 0:
                print(f"{step} loss {total.item() / 500:.4f} right {hits.item() / 300_000:.4f}", flush=True)
                total.zero_()
                hits.zero_()
            now = time.perf_counter()
            if warm is None and now - began > 2:
                warm = step, now
            if now - began > SECONDS:
                break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
