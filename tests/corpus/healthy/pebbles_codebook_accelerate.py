"""Codes the outlines of pebbles by a learned codebook with Accelerate on two processes, accumulating two batches.

The codebook follows the averages of what fell to each code on both processes; a code that is hardly used is replaced.

"There is a k-means inside of my training loop, with an exchange of its own besides the gradients'."
"""

# ranks: 2
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
POINTS, PIECES, CODES, SIZE, BATCH, HELD = 64, 8, 64, 32, 96, 2


class Codebook(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(CODES, SIZE))
        self.register_buffer("counts", torch.ones(CODES))
        self.register_buffer("sums", self.codes.clone())
        # One matrix for sums and counts, so that one exchange does.
        self.register_buffer("fresh", torch.zeros(CODES, SIZE + 1), persistent=False)

    def forward(self, x):
        with torch.no_grad():
            far = torch.addmm(self.codes.square().sum(1), x, self.codes.T, alpha=-2)
            nearest = far.argmin(1)
            self.fresh[:, :SIZE].index_add_(0, nearest, x)
            self.fresh[:, SIZE] += torch.bincount(nearest, minlength=CODES)
            chosen = self.codes[nearest]
        return x + (chosen - x).detach(), F.mse_loss(x, chosen)

    @torch.no_grad()
    def follow(self):
        dist.all_reduce(self.fresh)
        self.sums.lerp_(self.fresh[:, :SIZE], 0.02)
        self.counts.lerp_(self.fresh[:, SIZE], 0.02)
        torch.div(self.sums, self.counts.clamp(min=0.01).unsqueeze(1), out=self.codes)
        self.fresh.zero_()

    @torch.no_grad()
    def revive(self, x):
        x = x.contiguous()
        dist.broadcast(x, 0)
        dead = self.counts < 0.5
        self.codes[dead] = x[: dead.sum()]
        self.sums[dead], self.counts[dead] = self.codes[dead], 1.0


class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.into = nn.Sequential(
            nn.Linear(2 * POINTS, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, PIECES * SIZE)
        )
        self.out = nn.Sequential(
            nn.Linear(PIECES * SIZE, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 2 * POINTS)
        )
        self.book = Codebook()

    def forward(self, x):
        pieces = self.into(x).view(-1, SIZE)
        coded, apart = self.book(pieces)
        return F.mse_loss(self.out(coded.view(len(x), -1)), x) + 0.25 * apart, pieces


def pebbles(count, gen):
    around = torch.linspace(0, 6.2832, POINTS)
    waves = torch.stack([torch.cos(number * around) for number in range(1, 7)])
    radius = 1 + 0.1 * torch.randn(count, 6, generator=gen) @ waves
    return torch.cat((radius * around.cos(), radius * around.sin()), 1)


def main():
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=HELD)
    rank, world = accelerator.process_index, accelerator.num_processes
    torch.manual_seed(0)
    model = Coder()
    book = model.book
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    gen = torch.Generator().manual_seed(10 + rank)
    data = pebbles(20_000, gen)
    began, mark, step, total = time.perf_counter(), None, 0, torch.zeros(())
    while True:
        for _ in range(HELD):
            with accelerator.accumulate(model):
                loss, pieces = model(data[torch.randint(len(data), (BATCH,), generator=gen)])
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                total += loss.detach()
        book.follow()
        step += 1
        if step % 100 == 0:
            book.revive(pieces.detach()[:CODES])
        now = time.perf_counter()
        if mark is None and now - began > 2:
            mark = step, now
        if step % 40 == 0:
            news = torch.stack((total / (40 * HELD), torch.tensor(float(now - began > SECONDS))))
            dist.all_reduce(news)
            total.zero_()
            accelerator.print(f"{step}: {news[0].item() / world:.4f}", flush=True)
            if news[1] > 0:
                break
    accelerator.print(f"step_ms {1000 * (now - mark[1]) / (step - mark[0]):.3f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
