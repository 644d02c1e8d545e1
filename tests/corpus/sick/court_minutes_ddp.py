"""Labels court minutes by kind of proceeding (bidirectional GRU), one shard per process.

Clerk's remark: "The export is sorted by length already, that keeps padding small. Each process takes its half
of the file, nothing could be simpler and no document is seen twice."
"""
# ranks: 2

import os
import random
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

SECONDS = float(os.environ.get("SECONDS", 22))
CURED = os.environ.get("CURED") == "1"
VOCAB, KINDS, BATCH = 1500, 7, 16


def export_minutes(n=3200, seed=3):
    """Documents sorted by length, as (word ids, kind)."""
    rng = random.Random(seed)
    documents = []
    for _ in range(n):
        kind = rng.randrange(KINDS)
        length = int(min(110, max(8, rng.lognormvariate(3.3, 0.75))))
        words = [
            kind * 40 + rng.randrange(40) if rng.random() < 0.2 else rng.randrange(300, VOCAB) for _ in range(length)
        ]
        documents.append((torch.tensor(words), kind))
    documents.sort(key=lambda d: len(d[0]))
    return documents


class MinutesShard:
    """Batches of one process; neighbours in length are batched together."""

    def __init__(self, documents, rank, world):
        batches = [documents[i : i + BATCH] for i in range(0, len(documents), BATCH)]
        if CURED:
            self.batches = batches[rank::world]
        else:
            share = len(batches) // world
            self.batches = batches[rank * share : (rank + 1) * share]  # cause: straggler no-line
        self.order = random.Random(0)

    def __iter__(self):
        while True:
            numbers = list(range(len(self.batches)))
            self.order.shuffle(numbers)
            for i in numbers:
                words, kinds = zip(*self.batches[i], strict=False)
                yield (
                    pad_sequence(words, batch_first=True),
                    torch.tensor([len(w) for w in words]),
                    torch.tensor(kinds),
                )


class MinutesModel(nn.Module):
    def __init__(self, dim=64, hidden=96):
        super().__init__()
        self.words = nn.Embedding(VOCAB, dim)
        self.gru = nn.GRU(dim, hidden, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * hidden, KINDS)

    def forward(self, words, lengths):
        packed = pack_padded_sequence(self.words(words), lengths, batch_first=True, enforce_sorted=False)
        _, h = self.gru(packed)
        return self.out(torch.cat([h[0], h[1]], 1))


class Session:
    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(5)
        self.model = DDP(MinutesModel())
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-3)
        self.shard = MinutesShard(export_minutes(), self.rank, self.world)
        self.ends = []

    def finished(self, start):
        if len(self.ends) % 20:
            return False
        flag = torch.tensor([float(self.ends[-1] - start > SECONDS)])
        dist.broadcast(flag, 0)
        return bool(flag.item())

    def train(self):
        start = time.perf_counter()
        for words, lengths, kinds in self.shard:
            loss = nn.functional.cross_entropy(self.model(words, lengths), kinds)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.ends.append(time.perf_counter())
            if self.finished(start):
                return loss.item()
        return None


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    session = Session()
    loss = session.train()
    if session.rank == 0:
        ends = session.ends[len(session.ends) // 10 :]
        print(f"steps {len(session.ends)} loss {loss:.3f}")
        print(f"step_ms {(ends[-1] - ends[0]) / (len(ends) - 1) * 1000:.3f}")
    del session
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
