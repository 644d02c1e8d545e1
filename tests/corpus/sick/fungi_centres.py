"""Learns to tell fungi apart by their distance to the centre of each species, on two ranks.

The centres are running means over the embeddings of all ranks, so each rank has to see
the embeddings of the others.

"One rank alone is fast. With two ranks the gradients are small, less than a megabyte, yet I lose a lot of time."
"""
# ranks: 2

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
SPECIES, FEATURES, WIDTH, BATCH, KEEP = 60, 128, 128, 96, 0.95


def connect():
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29642")):
        os.environ.setdefault(name, value)
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def make_fungi(rank, count=20_000):
    g = torch.Generator().manual_seed(3)
    typical = torch.randn(SPECIES, FEATURES, generator=g)
    g.manual_seed(50 + rank)
    species = torch.randint(SPECIES, (count,), generator=g)
    return typical[species] + 1.5 * torch.randn(count, FEATURES, generator=g), species, g


def gather(embeddings, species, world):
    """The embeddings and species of all ranks, one below the other."""
    if CURED:
        all_embeddings = [torch.empty_like(embeddings) for _ in range(world)]
        all_species = [torch.empty_like(species) for _ in range(world)]
        dist.all_gather(all_embeddings, embeddings)
        dist.all_gather(all_species, species)
        return torch.cat(all_embeddings), torch.cat(all_species)
    found = [None] * world
    mine = [{"embedding": e, "species": s} for e, s in zip(embeddings, species.tolist(), strict=True)]
    dist.all_gather_object(found, mine)  # cause: hot-line
    samples = [sample for part in found for sample in part]
    return torch.stack([s["embedding"] for s in samples]), torch.tensor([s["species"] for s in samples])


class Centres:
    def __init__(self):
        self.mean = nn.functional.normalize(torch.randn(SPECIES, WIDTH), dim=1)

    def update(self, embeddings, species):
        total = torch.zeros_like(self.mean).index_add_(0, species, embeddings)
        count = torch.bincount(species, minlength=SPECIES)[:, None]
        seen = count[:, 0] > 0
        self.mean[seen] = KEEP * self.mean[seen] + (1 - KEEP) * total[seen] / count[seen]


def train(rank, world):
    torch.manual_seed(0)
    fungi, kinds, g = make_fungi(rank)
    net = nn.Sequential(nn.Linear(FEATURES, 384), nn.GELU(), nn.Linear(384, 384), nn.GELU(), nn.Linear(384, WIDTH))
    model = DDP(net)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    centres, stop = Centres(), torch.zeros(1)
    step, mark, now = 0, None, 0.0
    began = time.perf_counter()
    while True:
        now = time.perf_counter() - began
        if mark is None and now >= 2:
            mark = now, step
        if step % 20 == 0:  # the ranks have to agree about the end
            stop.fill_(now >= SECONDS)
            dist.broadcast(stop, 0)
            if stop.item():
                break
        rows = torch.randint(len(kinds), (BATCH,), generator=g)
        embeddings = nn.functional.normalize(model(fungi[rows]), dim=1)
        loss = nn.functional.cross_entropy(10 * embeddings @ centres.mean.t(), kinds[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
        centres.update(*gather(embeddings.detach(), kinds[rows], world))
        step += 1
        if rank == 0 and step % 200 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    if rank == 0:
        print(f"step_ms {(now - mark[0]) / max(1, step - mark[1]) * 1e3:.3f}", flush=True)


def main():
    torch.set_num_threads(1)
    rank, world = connect()
    train(rank, world)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
