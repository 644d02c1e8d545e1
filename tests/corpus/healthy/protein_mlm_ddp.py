"""Masked language model on protein sequences, DDP with gradient accumulation.

"Four micro-batches per optimizer step. Only the fourth waits for the other
process, so the steps look very uneven in my stopwatch; is something wrong?"
"""

# ranks: 2
import contextlib
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

SECONDS = float(os.environ.get("SECONDS", "22"))
ACIDS, LEN, D, MICRO, ACCUM = 24, 96, 96, 8, 4


class Mlm(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(ACIDS + 1, D)
        self.pos = nn.Parameter(0.02 * torch.randn(LEN, D))
        layer = nn.TransformerEncoderLayer(D, 4, 3 * D, 0.0, batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(D, ACIDS)

    def forward(self, x):
        return self.head(self.enc(self.tok(x) + self.pos))


def proteins(n=3000):
    g = torch.Generator().manual_seed(6)
    family = torch.randint(0, ACIDS, (40, LEN), generator=g)
    x = family[torch.randint(0, 40, (n,), generator=g)]
    mutated = torch.rand(n, LEN, generator=g) < 0.1
    return torch.where(mutated, torch.randint(0, ACIDS, (n, LEN), generator=g), x)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(Mlm())
    data = proteins()[rank::world]
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(10 + rank)
    t0, step, mark = time.time(), 0, None
    while True:
        opt.zero_grad()
        for k in range(ACCUM):
            x = data[torch.randint(0, len(data), (MICRO,))]
            hide = torch.rand(x.shape) < 0.15
            last = k == ACCUM - 1
            with contextlib.nullcontext() if last else model.no_sync():
                out = model(x.masked_fill(hide, ACIDS))
                loss = F.cross_entropy(out[hide], x[hide]) / ACCUM
                loss.backward()
        opt.step()
        step += 1
        if mark is None and time.time() - t0 > 2:
            mark = time.time(), step
        if step % 10 == 0:
            over = torch.tensor([float(time.time() - t0 > SECONDS)])
            dist.all_reduce(over, op=dist.ReduceOp.MAX)
            if over.item():
                break
            if rank == 0 and step % 50 == 0:
                print(f"{step} loss {loss.item() * ACCUM:.3f}", flush=True)
    if rank == 0:
        print(f"step_ms {(time.time() - mark[0]) / (step - mark[1]) * 1000:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
