"""Segments generated microscope pictures on two processes with Accelerate and follows the mean IoU in training.

Circles of several kinds on a noisy ground; a small U-shaped net.

"On one process a step takes far less than on two with the same batch per process. I know that the gradients have
to be exchanged, but this model has some ten thousand weights only."
"""

# ranks: 2
import os
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
torch.set_num_threads(1)

SIZE, KINDS, BATCH = 80, 16, 4


def paint(number, seed):
    gen = torch.Generator().manual_seed(seed)
    grid = torch.arange(SIZE)
    mask = torch.zeros(number, SIZE, SIZE, dtype=torch.long)
    for i in range(number):
        for _ in range(5):
            y, x = torch.randint(SIZE, (2,), generator=gen)
            kind = torch.randint(1, KINDS, (1,), generator=gen)
            inside = (grid[:, None] - y) ** 2 + (grid[None] - x) ** 2 < 80
            mask[i][inside] = kind
    picture = mask[:, None].float() / KINDS + 0.05 * torch.randn(number, 1, SIZE, SIZE, generator=gen)
    return TensorDataset(picture, mask)


class CellNet(nn.Module):
    def __init__(self, w=16):
        super().__init__()
        self.a = nn.Conv2d(1, w, 3, padding=1)
        self.b = nn.Conv2d(w, 2 * w, 3, stride=2, padding=1)
        self.c = nn.Conv2d(2 * w, 2 * w, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * w, w, 2, stride=2)
        self.out = nn.Conv2d(2 * w, KINDS, 1)

    def forward(self, x):
        a = F.relu(self.a(x))
        deep = F.relu(self.c(F.relu(self.b(a))))
        return self.out(torch.cat([a, F.relu(self.up(deep))], 1))


def confusion(found, truth):
    return torch.bincount((truth * KINDS + found).flatten(), minlength=KINDS * KINDS).view(KINDS, KINDS)


def mean_iou(table):
    hit = table.diag().float()
    return (hit / (table.sum(0) + table.sum(1) - hit).clamp(min=1)).mean().item()


def endless(loader):
    while True:
        yield from loader


def main():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    net = CellNet()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    loader = DataLoader(paint(320, 9), batch_size=BATCH, shuffle=True)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)

    table = torch.zeros(KINDS, KINDS, dtype=torch.long)
    start, mark = time.perf_counter(), None
    for step, (picture, mask) in enumerate(endless(loader), 1):
        logits = net(picture)
        loss = F.cross_entropy(logits, mask)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

        logits = logits.detach()
        if CURED:
            table += confusion(logits.argmax(1), mask)
        else:
            logits, mask = accelerator.gather_for_metrics((logits, mask))  # cause: hot-line
            table += confusion(logits.argmax(1), mask)
        now = time.perf_counter()
        if mark is None and now - start > 2:
            mark = now, step
        if step % 40 == 0:
            total = accelerator.reduce(table) if CURED else table
            accelerator.print(f"{step:6d} loss {loss.item():.3f} mIoU {mean_iou(total):.3f}")
            table.zero_()
            if accelerator.reduce(torch.tensor(float(now - start > SECONDS))) > 0:
                break
    accelerator.print(f"step_ms {1000 * (now - mark[0]) / (step - mark[1]):.3f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
