"""Train a GRU sentiment classifier on variable-length reviews with two ranks.

Reviews are sorted by length so that a batch has little padding, each rank takes its
share of the sorted list, batches are drawn at random inside the share.

"Rank 0 spends more than a third of its time in allreduce. The model is about a megabyte and both
ranks are on the same machine, is gloo really that slow? Rank 1 doesn't show it."
"""

# ranks: 2
import os
import random
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
VOCAB, BATCH = 4000, 24


class Reviews(Dataset):
    def __init__(self, n=6000, seed=0):
        rnd = random.Random(seed)
        g = torch.Generator().manual_seed(seed)
        self.items = []
        for _ in range(n):
            label = rnd.random() < 0.5
            length = int(min(160, max(3, rnd.lognormvariate(3.0, 1.1))))
            toks = torch.randint(2, VOCAB, (length,), generator=g)
            hint = torch.rand(length, generator=g) < 0.1
            toks[hint] = toks[hint] % 200 + 2 + 200 * label
            self.items.append((toks, int(label)))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class ShardedLengthSampler(Sampler):
    """Batches of neighbours in length, one shard for each rank."""

    def __init__(self, ds, rank, world, seed=0):
        order = sorted(range(len(ds)), key=lambda i: len(ds.items[i][0]))
        if CURED:
            # neighbours in length are dealt out, so the ranks' batches with one number match in length
            shard = order[rank::world]
        else:
            per = len(order) // world
            shard = order[rank * per : (rank + 1) * per]  # cause: straggler no-line
        self.batches = [shard[i : i + BATCH] for i in range(0, len(shard) - BATCH + 1, BATCH)]
        self.seed, self.epoch = seed, 0

    def __iter__(self):
        rnd = random.Random(self.seed + self.epoch)  # the same on all ranks
        self.epoch += 1
        b = list(self.batches)
        rnd.shuffle(b)
        return iter(b)

    def __len__(self):
        return len(self.batches)


def collate(items):
    toks, ys = zip(*items, strict=False)
    lens = torch.tensor([len(t) for t in toks])
    return pad_sequence(toks, batch_first=True), lens, torch.tensor(ys)


class Sentiment(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, 48, padding_idx=0)
        self.rnn = nn.GRU(48, 96, batch_first=True)
        self.out = nn.Sequential(nn.Dropout(0.2), nn.Linear(96, 2))

    def forward(self, x, lens):
        packed = pack_padded_sequence(self.emb(x), lens, batch_first=True, enforce_sorted=False)
        _, h = self.rnn(packed)
        return self.out(h[-1])


def forever(loader):
    while True:
        yield from loader


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    ds = Reviews()
    loader = DataLoader(ds, batch_sampler=ShardedLengthSampler(ds, rank, world), collate_fn=collate)
    model = DistributedDataParallel(Sentiment())
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    flag, step, t_warm = torch.zeros(1), 0, None
    t0 = time.time()
    for x, lens, y in forever(loader):
        if step % 20 == 0:
            flag.fill_(time.time() - t0 > SECONDS)
            dist.broadcast(flag, src=0)
            if flag.item() > 0:
                break
        if t_warm is None and time.time() - t0 > 2:
            t_warm, s_warm = time.time(), step
        loss = nn.functional.cross_entropy(model(x, lens), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        if step % 100 == 0 and rank == 0:
            print(f"step {step} loss {loss.item():.4f}")
    if rank == 0:
        print(f"step_ms {(time.time() - t_warm) * 1000 / max(1, step - s_warm):.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
