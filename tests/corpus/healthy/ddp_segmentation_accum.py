"""Trains a small U-Net for blob segmentation with DDP (gloo, two ranks) and gradient accumulation.

Micro-batches other than the last are under no_sync; the loss is averaged over
the ranks every 50 steps; batch statistics are small, so DDP's buffer broadcast stays on.

"Rank 0 and rank 1 wait for each other now and then in the all-reduce. Should I worry?"
"""

# ranks: 2
import contextlib
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SECONDS = float(os.environ.get("SECONDS", "22"))
torch.set_num_threads(1)

ACCUM = 2
SIZE = 32


def make_data(n=1200):
    g = torch.Generator().manual_seed(0)
    ax = torch.arange(SIZE).float()
    c = torch.rand(n, 3, 2, generator=g) * SIZE
    r = 2 + 4 * torch.rand(n, 3, generator=g)
    d = (ax[None, None, :, None] - c[..., 0, None, None]) ** 2 + (ax[None, None, None, :] - c[..., 1, None, None]) ** 2
    mask = (d < r[..., None, None] ** 2).any(1, keepdim=True).float()
    return TensorDataset(mask + 0.6 * torch.randn(n, 1, SIZE, SIZE, generator=g), mask)


def conv(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self, w=12):
        super().__init__()
        self.d1, self.d2, self.mid = conv(1, w), conv(w, 2 * w), conv(2 * w, 2 * w)
        self.u2, self.u1 = conv(4 * w, w), conv(2 * w, w)
        self.out = nn.Conv2d(w, 1, 1)

    def forward(self, x):
        a = self.d1(x)
        b = self.d2(F.max_pool2d(a, 2))
        m = F.interpolate(self.mid(F.max_pool2d(b, 2)), scale_factor=2)
        u = F.interpolate(self.u2(torch.cat([b, m], 1)), scale_factor=2)
        return self.out(self.u1(torch.cat([a, u], 1)))


def micro_batches(ds):
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=8, sampler=sampler, drop_last=True)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(UNet())
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    data = micro_batches(make_data())
    step, mark, total, t0 = 0, None, torch.zeros(1), time.perf_counter()
    while True:
        for k in range(ACCUM):
            x, y = next(data)
            with contextlib.nullcontext() if k == ACCUM - 1 else model.no_sync():
                loss = F.binary_cross_entropy_with_logits(model(x), y) / ACCUM
                loss.backward()
            total += loss.detach()
        opt.step()
        opt.zero_grad()
        step += 1
        if step % 50 == 0:
            dist.all_reduce(total)
            if rank == 0 and step % 500 == 0:
                print(f"{step} loss {total.item() / 50 / dist.get_world_size():.4f}")
            total.zero_()
        now = time.perf_counter()
        if mark is None and now - t0 > 2:
            mark = now, step
        if step % 20 == 0:
            flag = torch.tensor([int(now - t0 > SECONDS)])
            dist.broadcast(flag, 0)
            if flag.item():
                break
    if rank == 0:
        print(f"step_ms {(now - mark[0]) / (step - mark[1]) * 1e3:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
