"""Next-chord model on jazz charts, sharded over two processes with fully_shard.

"We had exploding gradients in March. Since then a small class watches the norm of each parameter, and full_tensor()
is what the forum recommends, because the local shard gives only part of the norm."
"""
# ranks: 2

import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED", "") == "1"
ROOTS, KINDS, BARS = 12, 8, 32
CHORDS = ROOTS * KINDS


def jazz_charts(count, seed):
    """Charts that mostly walk along the circle of fifths."""
    g = torch.Generator().manual_seed(seed)
    root = torch.randint(0, ROOTS, (count,), generator=g)
    chart = []
    for _ in range(BARS + 1):
        kind = torch.randint(0, KINDS, (count,), generator=g)
        chart.append(root * KINDS + kind)
        leap = torch.randint(0, ROOTS, (count,), generator=g)
        root = torch.where(torch.rand(count, generator=g) < 0.8, (root + 5) % ROOTS, leap)
    return torch.stack(chart, 1)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ChordModel(nn.Module):
    def __init__(self, dim=96, depth=2):
        super().__init__()
        self.chord = nn.Embedding(CHORDS, dim)
        self.bar = nn.Parameter(torch.zeros(BARS, dim))
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, CHORDS)

    def forward(self, chart):
        h = self.chord(chart) + self.bar
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class GradientWatch:
    def __init__(self, every):
        self.every = every
        self.worst = {}

    def look(self, step, model):
        if step % self.every:
            return
        for name, p in model.named_parameters():
            norm = p.grad.full_tensor().norm().item()  # cause: hot-line
            self.worst[name] = max(norm, self.worst.get(name, 0.0))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = ChordModel()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    charts = jazz_charts(4000, seed=dist.get_rank())
    watch = GradientWatch(every=250 if CURED else 1)
    began, marks, step = time.perf_counter(), [], 0
    while True:
        chart = charts[torch.randint(0, len(charts), (16,))]
        loss = F.cross_entropy(model(chart[:, :-1]).flatten(0, 1), chart[:, 1:].flatten())
        loss.backward()
        watch.look(step, model)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        marks.append(time.perf_counter())
        if step % 20 == 0:
            late = torch.tensor([int(marks[-1] - began > SECONDS)])
            dist.broadcast(late, src=0)
            if late.item():
                break
    if dist.get_rank() == 0:
        marks = marks[step // 10 :]
        print(f"loss {loss.item():.3f} largest norm {max(watch.worst.values()):.2f}")
        print(f"step_ms {(marks[-1] - marks[0]) / (len(marks) - 1) * 1e3:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
