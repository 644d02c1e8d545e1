"""Trains an autoencoder of gene expression in single cells on two processes.

Counts of 3000 genes, log-normalised, in memory. The training class has grown over the years: it ran with Horovod,
then with plain torch.distributed, and now with DistributedDataParallel.

"The second process brings far less than I hoped, maybe a third more cells per second. The batches are equal and
neither rank is ever late."
"""

# ranks: 2
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.parallel import DistributedDataParallel

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
GENES, CELLS, BATCH = 3000, 2048, 64


def simulated_counts(seed=5):
    g = torch.Generator().manual_seed(seed)
    programs = torch.rand(8, GENES, generator=g).pow(6) * 4
    mixture = torch.rand(CELLS, 8, generator=g).pow(3)
    rates = mixture @ programs
    counts = torch.poisson(rates, generator=g)
    size = counts.sum(1, keepdim=True).clamp(min=1)
    return torch.log1p(counts / size * 1000)


class Autoencoder(nn.Module):
    def __init__(self, hidden=384, latent=32):
        super().__init__()
        self.encode = nn.Sequential(
            nn.Linear(GENES, hidden), nn.LayerNorm(hidden), nn.GELU(), nn.Linear(hidden, latent)
        )
        self.decode = nn.Sequential(
            nn.Linear(latent, hidden), nn.LayerNorm(hidden), nn.GELU(), nn.Linear(hidden, GENES)
        )

    def forward(self, cells):
        return self.decode(self.encode(cells))


def average_gradients(model):
    """Gives every rank the mean of the gradients of all ranks, with one message."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = _flatten_dense_tensors(grads)
    dist.all_reduce(flat)  # cause: redundant-all-reduce
    flat /= dist.get_world_size()
    for grad, mean in zip(grads, _unflatten_dense_tensors(flat, grads), strict=False):
        grad.copy_(mean)


class Training:
    def __init__(self, cells, rate=1e-3):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.cells = cells[self.rank :: self.world]
        self.model = DistributedDataParallel(Autoencoder())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, weight_decay=1e-2, fused=True)
        self.steps, self.total = 0, torch.zeros(())

    def step(self, batch):
        self.optimizer.zero_grad()
        kept = torch.rand_like(batch) > 0.2
        loss = nn.functional.mse_loss(self.model(batch * kept), batch)
        loss.backward()
        if self.world > 1 and not CURED:
            average_gradients(self.model)
        self.optimizer.step()
        self.total += loss.detach()
        self.steps += 1

    def over(self, seconds):
        flag = torch.tensor(float(seconds > SECONDS))
        dist.all_reduce(flag)
        return flag.item() > 0

    def run(self):
        began, warm = time.perf_counter(), None
        while True:
            for rows in torch.randperm(len(self.cells)).split(BATCH):
                self.step(self.cells[rows])
                now = time.perf_counter()
                if warm is None and now - began > 2:
                    warm = self.steps, now
                if self.steps % 20 == 0 and self.over(now - began):
                    return 1000 * (now - warm[1]) / (self.steps - warm[0])
            if self.rank == 0 and self.steps % 160 == 0:
                print(f"loss {self.total.item() / self.steps:.4f}", flush=True)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cells = simulated_counts()
    torch.manual_seed(11 + dist.get_rank())
    ms = Training(cells).run()
    if dist.get_rank() == 0:
        print(f"step_ms {ms:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
