"""Recognises accents from filter bank features; two ranks train, and both know the score on the held-out speakers.

"There are few labelled speakers to train on and many to test on, so I expected the test to be noticed. But with two
processes it takes just as long as it took with one, while the training did get faster."
"""
# ranks: 2

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
FILTERS, FRAMES, ACCENTS, BATCH = 40, 50, 7, 64


class Utterances(Dataset):
    def __init__(self, count, seed):
        g = torch.Generator().manual_seed(seed)
        voices = torch.randn(ACCENTS, FILTERS, 1, generator=torch.Generator().manual_seed(0))
        self.accents = torch.randint(ACCENTS, (count,), generator=g)
        self.features = torch.randn(count, FILTERS, FRAMES, generator=g) + 0.4 * voices[self.accents]

    def __len__(self):
        return len(self.accents)

    def __getitem__(self, rows):
        return self.features[rows], self.accents[rows]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(FILTERS, 96, 5, padding=2)
        self.second = nn.Conv1d(96, 96, 5, stride=2, padding=2)
        self.last = nn.Linear(96, ACCENTS)

    def forward(self, x):
        x = torch.relu(self.second(torch.relu(self.first(x))))
        return self.last(x.mean(2))


@torch.no_grad()
def validate(net, held, rank, world):
    net.eval()
    hits, seen = torch.zeros(1), torch.zeros(1)
    first, stride = (rank, world) if CURED else (0, 1)
    rows = range(first, len(held), stride)
    for start in range(0, len(rows), 200):
        features, accents = held[list(rows[start : start + 200])]
        hits += (net(features).argmax(1) == accents).sum()  # cause: hot-line or frequent-validation
        seen += len(accents)
    net.train()
    if CURED:
        dist.all_reduce(hits)
        dist.all_reduce(seen)
    return (hits / seen).item()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train, held = Utterances(2_560, seed=1), Utterances(8_000, seed=2)
    sampler = DistributedSampler(train, world, rank, shuffle=True, drop_last=True)
    loader = DataLoader(train, sampler=BatchSampler(sampler, BATCH, drop_last=True), batch_size=None)
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    began, warm, step, epoch, best = time.perf_counter(), None, 0, 0, 0.0
    stop = torch.zeros(1)
    while not stop.item():
        sampler.set_epoch(epoch)
        for features, accents in loader:
            loss = nn.functional.cross_entropy(model(features), accents)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
        best = max(best, validate(model.module, held, rank, world))  # cause: hot-line or frequent-validation
        epoch += 1
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        stop.fill_(now - began > SECONDS)
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(f"epochs {epoch} best accuracy {best:.3f}")
        print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
