"""Trains a small causal transformer sharded with FSDP2 on two gloo ranks.

Random Markov text; blocks are sharded so that no rank holds all of the weights.

"Both ranks show a busy CPU, but the matmuls are only a part of it. There is a forest of small gaps
before nearly every layer, forward as well as backward. Is sharding always that dear?"
"""

# ranks: 2
# cause: fsdp-small-units no-line
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

VOCAB, DIM, DEPTH, HEADS, CTX, BATCH = 96, 64, 1, 4, 48, 8


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.o = nn.Linear(DIM, DIM)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (m(x).view(b, t, HEADS, -1).transpose(1, 2) for m in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, t, DIM))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.att, self.n2 = nn.LayerNorm(DIM), Attention(), nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        x = x + self.att(self.n1(x))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, DIM), nn.Embedding(CTX, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        for b in self.blocks:
            x = b(x)
        return self.out(self.norm(x))


def shard(model, mesh):
    if CURED:
        units = list(model.blocks)
    else:
        units = [m for m in model.blocks.modules() if isinstance(m, nn.Linear)]
    for m in units:
        fully_shard(m, mesh=mesh)
    fully_shard(model, mesh=mesh)


def stream(rank):
    g = torch.Generator().manual_seed(rank)
    nxt = torch.randint(0, VOCAB, (VOCAB, 4), generator=torch.Generator().manual_seed(99))
    text = torch.empty(60_000, dtype=torch.long)
    cur, choice = 0, torch.randint(0, 4, (60_000,), generator=g).tolist()
    table = nxt.tolist()
    for i, c in enumerate(choice):
        cur = table[cur][c]
        text[i] = cur
    while True:
        at = torch.randint(0, len(text) - CTX - 1, (BATCH,), generator=g)
        win = text[at[:, None] + torch.arange(CTX + 1)]
        yield win[:, :-1], win[:, 1:]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = LM()
    shard(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = stream(rank)
    step, mark, t0 = 0, None, time.perf_counter()
    while True:
        x, y = next(data)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
        step += 1
        now = time.perf_counter()
        if mark is None and now - t0 > 2:
            mark = now, step
        if step % 20 == 0:
            flag = torch.tensor([float(now - t0 > SECONDS)])
            dist.broadcast(flag, 0)
            if flag.item() > 0:
                break
    if rank == 0:
        print(f"step_ms {(now - mark[0]) / (step - mark[1]) * 1e3:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
