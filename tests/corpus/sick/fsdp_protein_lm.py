"""Trains a masked language model of protein sequences, sharded with FSDP2 over two processes.

Sequences are made of a few repeated motifs, so that there is something to learn.

"Two processes are slower together than one alone, and the profile is full of gathers with just a few
kilobytes each. In the tutorial the communication hid behind the computation."
"""

# cause: fsdp-small-units no-line
# ranks: 2
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
torch.set_num_threads(1)

AMINO = "ACDEFGHIKLMNPQRSTVWY"
MASK = len(AMINO)
LENGTH, WIDTH, HEADS, DEPTH, BATCH = 72, 96, 4, 1, 8


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, WIDTH))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ProteinLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(MASK + 1, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, MASK)

    def forward(self, tokens):
        x = self.embed(tokens) + self.place(torch.arange(LENGTH))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def shard(model, mesh):
    for layer in model.layers:
        if not CURED:
            for part in layer.children():
                fully_shard(part, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def sequences(rank):
    gen = torch.Generator().manual_seed(100 + rank)
    motifs = torch.randint(MASK, (30, 12), generator=torch.Generator().manual_seed(0))
    while True:
        pick = torch.randint(len(motifs), (BATCH, LENGTH // 12), generator=gen)
        truth = motifs[pick].flatten(1)
        hidden = torch.rand(truth.shape, generator=gen) < 0.15
        yield truth.masked_fill(hidden, MASK), truth.masked_fill(~hidden, -100)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = shard(ProteinLM(), init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    begin, warm = time.perf_counter(), None
    for step, (tokens, labels) in enumerate(sequences(rank), 1):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        passed = time.perf_counter() - begin
        if warm is None and passed > 2:
            warm = passed, step
        if step % 25 == 0:
            state = torch.tensor([loss.item(), float(passed > SECONDS)])
            dist.all_reduce(state)
            if rank == 0:
                print(f"step {step} loss {state[0] / dist.get_world_size():.3f}")
            if state[1] > 0:
                break
    if rank == 0:
        print(f"step_ms {1000 * (passed - warm[0]) / (step - warm[1]):.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
