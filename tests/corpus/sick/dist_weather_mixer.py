"""Forecasts weather stations with an MLP mixer; data parallel by hand with torch.distributed on two processes.

The function that averages the gradients is the one from the introduction to distributed training.

"The deeper I make the model, the worse two processes scale, even when I make it narrower so that its number of
weights stays the same. The same number of bytes is sent, is it not?"
"""

# ranks: 2
import os
import time

import torch
import torch.distributed as dist
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"

STATIONS, HOURS, AHEAD = 32, 48, 6


class MixerBlock(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.norm_time, self.norm_place = (nn.LayerNorm(n, elementwise_affine=False) for n in (HOURS, STATIONS))
        self.time = nn.Sequential(nn.Linear(HOURS, hidden), nn.GELU(), nn.Linear(hidden, HOURS))
        self.place = nn.Sequential(nn.Linear(STATIONS, hidden), nn.GELU(), nn.Linear(hidden, STATIONS))

    def forward(self, x):
        x = x + self.time(self.norm_time(x))
        y = x.transpose(1, 2)
        return (y + self.place(self.norm_place(y))).transpose(1, 2)


class Mixer(nn.Module):
    def __init__(self, depth=2, hidden=256):
        super().__init__()
        self.blocks = nn.Sequential(*(MixerBlock(hidden) for _ in range(depth)))
        self.head = nn.Linear(HOURS, AHEAD)

    def forward(self, x):
        return self.head(self.blocks(x))


def weather(days=400):
    gen = torch.Generator().manual_seed(3)
    hours = torch.arange(days * 24)
    daily = torch.sin(2 * torch.pi * (hours / 24 + torch.rand(STATIONS, 1, generator=gen)))
    fronts = torch.randn(STATIONS, len(hours), generator=gen).cumsum(1) * 0.02
    return daily + fronts


def batches(series, rank, size=32):
    gen = torch.Generator().manual_seed(50 + rank)
    windows = series.unfold(1, HOURS + AHEAD, 1).transpose(0, 1)
    while True:
        chosen = windows[torch.randint(len(windows), (size,), generator=gen)]
        yield chosen[..., :HOURS], chosen[..., HOURS:]


def average_gradients(model):
    size = float(dist.get_world_size())
    if CURED:
        grads = [p.grad for p in model.parameters()]
        flat = torch.cat([g.flatten() for g in grads])
        dist.all_reduce(flat)
        flat /= size
        parts = flat.split([g.numel() for g in grads])
        torch._foreach_copy_(grads, [part.view_as(g) for part, g in zip(parts, grads, strict=True)])
        return
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)  # cause: small-collectives
        param.grad.data /= size


def run(rank):
    torch.manual_seed(1234)
    model = Mixer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    began, warm, total = time.perf_counter(), None, 0.0
    for step, (past, future) in enumerate(batches(weather(), rank), 1):
        optimizer.zero_grad()
        loss = nn.functional.l1_loss(model(past), future)
        loss.backward()
        average_gradients(model)
        optimizer.step()
        total += loss.item()

        passed = time.perf_counter() - began
        if warm is None and passed > 2:
            warm = (passed, step)
        if step % 50 == 0:
            if rank == 0:
                print(f"step {step}, mean absolute error {total / 50:.4f}")
            total = 0.0
            late = torch.tensor(int(passed > SECONDS))
            dist.broadcast(late, 0)
            if late:
                break
    if rank == 0:
        print(f"step_ms {(passed - warm[0]) / (step - warm[1]) * 1e3:.3f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    run(dist.get_rank())
    dist.destroy_process_group()
