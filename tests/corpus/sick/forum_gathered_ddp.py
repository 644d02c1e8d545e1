"""Guesses the section of a forum from the words of a post; two ranks, training accuracy on the console.

"Each process alone runs at twice the speed. Is gloo so slow?"
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
WORDS, SECTIONS = 3_000, 1_500


class Posts:
    def __init__(self, seed, count=4_000, length=30):
        self.generator = torch.Generator().manual_seed(seed)
        self.words = torch.randint(0, WORDS, (count, length), generator=self.generator)
        self.sections = torch.randint(0, SECTIONS, (count,), generator=self.generator)

    def batch(self, size=256):
        rows = torch.randint(0, len(self.words), (size,), generator=self.generator)
        sections = self.sections[rows]
        noise = torch.randint(0, SECTIONS, (size,), generator=self.generator)
        return self.words[rows], torch.where(rows % 2 == 0, sections, noise)


class Guesser(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.words = nn.EmbeddingBag(WORDS, width, mode="mean")
        self.body = nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU())
        self.out = nn.Linear(width, SECTIONS)

    def forward(self, words):
        return self.out(self.body(self.words(words)))


def accuracy_over_ranks(logits, sections):
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, {"logits": logits.detach(), "sections": sections})  # cause: hot-line
    logits = torch.cat([part["logits"] for part in parts])
    sections = torch.cat([part["sections"] for part in parts])
    return (logits.argmax(1) == sections).float().mean()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Guesser())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    posts = Posts(rank)
    accuracy, stop = torch.zeros(()), torch.zeros(1)
    began, warm, step = time.perf_counter(), None, 0
    while True:
        words, sections = posts.batch()
        logits = model(words)
        loss = nn.functional.cross_entropy(logits, sections)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if not CURED:
            accuracy = accuracy_over_ranks(logits, sections)  # cause: hot-line
        elif step % 100 == 0:
            accuracy = (logits.argmax(1) == sections).float().mean()
            dist.all_reduce(accuracy)
            accuracy /= dist.get_world_size()
        if rank == 0 and step % 100 == 0:
            print(f"{step} loss {loss.item():.3f} accuracy {accuracy.item():.3f}", flush=True)
        step += 1
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if step % 20 == 0:
            stop.fill_(now - began > SECONDS)
            dist.all_reduce(stop, op=dist.ReduceOp.MAX)
            if stop.item():
                break
    if rank == 0:
        print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
