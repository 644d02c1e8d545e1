# ranks: 2
"""Classifies reviews with adversarial training of the embeddings (FGM), under DistributedDataParallel.

"The attack goes where the gradients of all ranks lead, so the first pass has to be reduced, too."
"""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SECONDS = float(os.environ.get("SECONDS", "22"))


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(4000, 128)
        self.body = nn.Sequential(
            nn.Linear(128, 768), nn.GELU(), nn.Linear(768, 768), nn.GELU(), nn.Linear(768, 768), nn.GELU()
        )
        self.head = nn.Linear(768, 2)

    def forward(self, tokens):
        return self.head(self.body(self.words(tokens).mean(1)))


class FGM:
    def __init__(self, weight, size=0.5):
        self.weight, self.size, self.kept = weight, size, None

    @torch.no_grad()
    def attack(self):
        self.kept = self.weight.detach().clone()
        self.weight.add_(self.weight.grad, alpha=self.size / (self.weight.grad.norm().item() + 1e-12))

    @torch.no_grad()
    def restore(self):
        self.weight.copy_(self.kept)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    reader = Reader()
    model = DistributedDataParallel(reader)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    fgm = FGM(reader.words.weight)
    reviews = torch.randint(0, 4000, (4096, 40))
    kinds = (reviews[:, :8].sum(1) > 16_000).long()
    step, began, warm = 0, time.perf_counter(), None
    stop = torch.zeros(1)
    while not stop.item():
        some = torch.randint(0, 4096, (64,))
        tokens, y = reviews[some], kinds[some]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens), y).backward()
        fgm.attack()
        nn.functional.cross_entropy(model(tokens), y).backward()
        fgm.restore()
        optimizer.step()
        step += 1
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if step % 20 == 0:
            stop.fill_(now - began > SECONDS)
            dist.all_reduce(stop, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
