"""Learns fungi from labels that are often wrong: a sample counts where two passes with dropout name the same kind.

"It goes through the network twice per batch. The second one is what makes the first one trustworthy, no?"
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
KINDS = 20


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(400, 512), nn.ReLU(), nn.Dropout(0.4), nn.Linear(512, 512), nn.ReLU(), nn.Dropout(0.4),
        nn.Linear(512, KINDS),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-4)
    pattern, kinds = torch.randn(KINDS, 400), torch.randint(KINDS, (6000,))
    x = pattern[kinds] + 2 * torch.randn(6000, 400)
    wrong = torch.rand(6000) < 0.3
    names = torch.where(wrong, torch.randint(KINDS, (6000,)), kinds)
    began, warm, step = time.perf_counter(), None, 0
    while True:
        rows = torch.randint(6000, (128,))
        fungi, named = x[rows], names[rows]
        logits = net(fungi)
        again = net(fungi).detach().argmax(1)
        agrees = (again == logits.argmax(1)).float()
        loss = (nn.functional.cross_entropy(logits, named, reduction="none") * (0.1 + agrees)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
