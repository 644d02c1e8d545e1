"""Two-tower query-to-product retrieval for a web shop, trained with DDP.

"The towers are tiny MLPs with a few hundred kilobytes of gradients, yet two processes
are hardly faster than one. I tried bucket_cap_mb and gradient_as_bucket_view,
no change. Is gradient all-reduce over gloo really this expensive?"
"""

# ranks: 2
import os
from time import perf_counter

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"

PRODUCTS, FEATURES, QUERY, DIM = 160_000, 64, 128, 128


def tower(n_in):
    return nn.Sequential(
        nn.Linear(n_in, 192), nn.GELU(), nn.LayerNorm(192), nn.Linear(192, 192), nn.GELU(), nn.Linear(192, DIM)
    )


class TwoTower(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.query = tower(QUERY)
        self.product = tower(FEATURES)
        self.log_t = nn.Parameter(torch.tensor(2.0))
        # features of the catalogue never change, keep them with the model so .to() moves them
        self.register_buffer("catalogue", features, persistent=False)

    def forward(self, q, positives, negatives):
        ids = torch.cat([positives, negatives])
        p = F.normalize(self.product(self.catalogue[ids]), dim=-1)
        q = F.normalize(self.query(q), dim=-1)
        return q @ p.T * self.log_t.exp()


def clicks(features, mix, gen, batch):
    ids = torch.randint(0, PRODUCTS, (batch,), generator=gen)
    q = features[ids] @ mix + 0.5 * torch.randn(batch, QUERY, generator=gen)
    return q, ids, torch.randint(0, PRODUCTS, (batch,), generator=gen)


def train():
    dist.init_process_group(backend="gloo")
    rank = dist.get_rank()
    common = torch.Generator().manual_seed(1)
    features = torch.randn(PRODUCTS, FEATURES, generator=common)
    mix = torch.randn(FEATURES, QUERY, generator=common) / 8
    gen = torch.Generator().manual_seed(100 + rank)
    torch.manual_seed(0)
    model = TwoTower(features)
    extra = {"broadcast_buffers": False} if CURED else {}
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, **extra)  # cause: hot-line
    opt = torch.optim.Adam(ddp.parameters(), lr=1e-3)
    begin = perf_counter()
    n = 0
    counted_from = None
    while True:
        q, pos, neg = clicks(features, mix, gen, 192)
        logits = ddp(q, pos, neg)
        loss = F.cross_entropy(logits, torch.arange(len(q)))
        opt.zero_grad()
        loss.backward()
        opt.step()
        n += 1
        t = perf_counter() - begin
        if counted_from is None and t > 2:
            counted_from = (t, n)
        if n % 10 == 0:
            over = torch.tensor(int(t > SECONDS))
            dist.all_reduce(over, dist.ReduceOp.MAX)
            if over:
                break
        if rank == 0 and n % 100 == 0:
            hit = (logits.argmax(1) == torch.arange(len(q))).float().mean()
            print(f"{n:6d} loss {loss.item():.3f} in-batch hit {hit.item():.3f}", flush=True)
    if rank == 0:
        print(f"step_ms {1e3 * (t - counted_from[0]) / (n - counted_from[1]):.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
