# ranks: 2
"""Trains a tagger of terms in glossaries on two ranks; each word counts the same, whichever rank it is on.

For this the ranks have to know how many words both of them have, before they go backward.

"There is a collective of a single number in each of my steps. Everything that I have read says that this is bad."
"""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

SECONDS = float(os.environ.get("SECONDS", "22"))
WORDS, LENGTH, TAGS, BATCH = 700, 32, 6, 24


class Tagger(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.near = nn.ModuleList(nn.Conv1d(width, width, 5, padding=2) for _ in range(3))
        self.tag = nn.Linear(width, TAGS)

    def forward(self, words):
        x = self.words(words).transpose(1, 2)
        for conv in self.near:
            x = x + F.gelu(conv(x))
        return self.tag(x.transpose(1, 2))


def batches(seed):
    g = torch.Generator().manual_seed(seed)
    words = torch.randint(1, WORDS, (3_000, LENGTH), generator=g)
    tags = (words + words.roll(1, 1)) % TAGS
    counted = torch.rand(3_000, LENGTH, generator=g) < 0.8
    tags[~counted] = -100
    while True:
        for rows in torch.randperm(3_000, generator=g).split(BATCH):
            yield words[rows], tags[rows]


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(Tagger(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    began, warm, step = time.perf_counter(), None, 0
    for words, tags in batches(rank):
        counted = (tags >= 0).sum().float()
        pending = dist.all_reduce(counted, async_op=True)
        logits = model(words)
        total = F.cross_entropy(logits.flatten(0, 1), tags.flatten(), reduction="sum")
        pending.wait()
        loss = total * ranks / counted
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if step % 25 == 0:
            over = torch.tensor(float(now - began > SECONDS))
            dist.all_reduce(over, op=dist.ReduceOp.MAX)
            if over:
                break
    if rank == 0:
        print(f"loss {loss.item():.4f}")
        print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
