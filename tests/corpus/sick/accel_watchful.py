# cause: frequent-validation no-line
"""Image classification with Accelerate; keeps an eye on the held-out accuracy for early stopping.
Author's remark: "patience counts evaluations, so I evaluate often"."""

import os
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
EVAL_EVERY = 100 if CURED else 25  # as much less often as is advised


def split(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 10, (n,), generator=g)
    x = torch.randn(n, 3, 24, 24, generator=g) + y.view(-1, 1, 1, 1) / 10
    return TensorDataset(x, y)


def build():
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(24, 48, 3, padding=1),
        nn.BatchNorm2d(48),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(48, 64, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


@torch.no_grad()
def evaluate(accelerator, model, loader):
    model.eval()
    hits = total = 0
    for x, y in loader:
        guess = model(x).argmax(-1)
        guess, y = accelerator.gather_for_metrics((guess, y))
        hits += (guess == y).sum().item()
        total += y.numel()
    model.train()
    return hits / total


def main():
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10_000)
    train = DataLoader(split(4096, 0), batch_size=32, shuffle=True, drop_last=True)
    held = DataLoader(split(960, 1), batch_size=64)
    model, optimizer, schedule, train, held = accelerator.prepare(model, optimizer, schedule, train, held)
    best, misses, step = 0.0, 0, 0
    t0, warm = time.perf_counter(), None
    while True:
        for x, y in train:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            step += 1
            if step % EVAL_EVERY == 0:
                score = evaluate(accelerator, model, held)
                best, misses = (score, 0) if score > best else (best, misses + 1)
            now = time.perf_counter()
            if warm is None and now - t0 > 2:
                warm = (now, step)
            if now - t0 > SECONDS:
                accelerator.print(f"best {best:.3f} misses {misses}")
                accelerator.print(f"step_ms {(now - warm[0]) * 1e3 / (step - warm[1]):.3f}", flush=True)
                return


if __name__ == "__main__":
    main()
