"""Learns to find the captions of paintings by a contrastive loss over the batches of both ranks.

The gather passes gradients back, so both ranks train on the negatives of both.

"I went from one to two processes with the same batch per process. I know that there is more to communicate, but the
network only sends a few hundred kilobytes, and still every step got much slower, on both ranks alike."
"""

# ranks: 2
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
BATCH, SHARED, PIXELS, WORDS, LENGTH = 384, 192, 128, 500, 10


class Gather(torch.autograd.Function):
    """All ranks' rows, in the order of the ranks; the gradient is the sum over the ranks for the own rows."""

    @staticmethod
    def forward(ctx, rows):
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.painting = nn.Sequential(nn.Linear(PIXELS, 128), nn.GELU(), nn.Linear(128, SHARED))
        self.words = nn.EmbeddingBag(WORDS, 96, mode="mean")
        self.caption = nn.Sequential(nn.GELU(), nn.Linear(96, SHARED))
        self.sharpness = nn.Parameter(torch.tensor(2.6))

    def forward(self, painting, caption):
        a = nn.functional.normalize(self.painting(painting), dim=1)
        b = nn.functional.normalize(self.caption(self.words(caption)), dim=1)
        return a, b, self.sharpness.exp()


def contrast(a, b, sharpness):
    """How well each painting finds its caption among the captions of both ranks."""
    all_b = Gather.apply(b)
    if CURED:
        mine = torch.arange(len(a)) + dist.get_rank() * len(a)
        return nn.functional.cross_entropy(sharpness * a @ all_b.T, mine)
    all_a = Gather.apply(a)
    likeness = sharpness * all_a @ all_b.T  # cause: hot-line
    # both ranks hold the whole loss, and the gather sums over them
    return nn.functional.cross_entropy(likeness, torch.arange(len(all_a)))


class Museum:
    """Paintings whose features follow from the words of their captions."""

    def __init__(self, rank, seed=9):
        g = torch.Generator().manual_seed(seed)
        self.looks = torch.randn(WORDS, PIXELS, generator=g)
        self.g = torch.Generator().manual_seed(seed + 1 + rank)

    def batch(self):
        caption = torch.randint(WORDS, (BATCH, LENGTH), generator=self.g)
        painting = nn.functional.embedding_bag(caption, self.looks, mode="sum")
        return painting / 3 + 0.5 * torch.randn(BATCH, PIXELS, generator=self.g), caption


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Towers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    museum = Museum(rank)
    step, mark, t0 = 0, None, time.perf_counter()
    while True:
        loss = contrast(*model(*museum.batch()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.module.sharpness.clamp_(max=4.6)
        step += 1
        now = time.perf_counter()
        if mark is None and now - t0 > 2:
            mark = step, now
        if step % 20 == 0:
            over = torch.tensor(float(now - t0 > SECONDS))
            dist.all_reduce(over, op=dist.ReduceOp.MAX)
            if rank == 0 and step % 100 == 0:
                print(f"{step}: loss {loss.item():.3f}", flush=True)
            if over.item():
                break
    if rank == 0:
        print(f"step_ms {1000 * (now - mark[1]) / (step - mark[0]):.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
