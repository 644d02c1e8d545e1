"""Learns features of pictures of moss without labels, with a momentum encoder and a queue (as MoCo does).

The queue is small and rebuilt in each step, the loss is read in each step, the second encoder follows
the first by a moving average.

"I call item() on the loss in each step and torch.cat on the queue, could that be what makes it slow?"
"""

import copy
import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
torch.set_num_threads(1)
PICTURES, SIDE, BATCH, QUEUE, OUT, TEMPERATURE, MOMENTUM = 1500, 40, 32, 1024, 64, 0.2, 0.99


def make_moss():
    g = torch.Generator().manual_seed(5)
    coarse = torch.rand(PICTURES, 3, 6, 6, generator=g)
    fine = torch.rand(PICTURES, 3, SIDE, SIDE, generator=g)
    return nn.functional.interpolate(coarse, SIDE, mode="bicubic") * 0.8 + fine * 0.2


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layers, channels = [], 3
        for width, stride in ((24, 1), (32, 2), (48, 2), (64, 2)):
            layers += [nn.Conv2d(channels, width, 3, stride, 1), nn.GroupNorm(8, width), nn.ReLU()]
            channels = width
        self.body = nn.Sequential(*layers)
        self.head = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, OUT))

    def forward(self, x):
        return nn.functional.normalize(self.head(self.body(x).mean((2, 3))), dim=1)


def view(pictures):
    """A random crop of 32 pixels, turned over half of the time, a little brighter or darker."""
    top, left = torch.randint(SIDE - 32, (2,)).tolist()
    crop = pictures[:, :, top : top + 32, left : left + 32]
    if torch.rand(()) < 0.5:
        crop = crop.flip(3)
    return crop * (0.7 + 0.6 * torch.rand(len(crop), 1, 1, 1))


@torch.no_grad()
def follow(slow, fast):
    slow, fast = list(slow.parameters()), list(fast.parameters())
    torch._foreach_lerp_(slow, fast, 1 - MOMENTUM)


def main():
    torch.manual_seed(0)
    moss = make_moss()
    fast = Encoder()
    slow = copy.deepcopy(fast).requires_grad_(False)
    queue = nn.functional.normalize(torch.randn(QUEUE, OUT), dim=1)
    opt = torch.optim.SGD(fast.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
    truth = torch.zeros(BATCH, dtype=torch.long)
    history, step, mark = [], 0, None
    began = time.perf_counter()
    while True:
        now = time.perf_counter() - began
        if mark is None and now >= 2:
            mark = now, step
        if now >= SECONDS:
            break
        pictures = moss[torch.randint(PICTURES, (BATCH,))]
        q = fast(view(pictures))
        with torch.no_grad():
            k = slow(view(pictures))
        scores = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.t()], 1) / TEMPERATURE
        loss = nn.functional.cross_entropy(scores, truth)
        opt.zero_grad()
        loss.backward()
        opt.step()
        follow(slow, fast)
        queue = torch.cat([queue, k])[-QUEUE:]
        history.append(loss.item())
        step += 1
        if step % 100 == 0:
            print(f"step {step} loss {sum(history[-100:]) / 100:.4f}")
    print(f"step_ms {(now - mark[0]) / max(1, step - mark[1]) * 1e3:.3f}", flush=True)


if __name__ == "__main__":
    main()
