"""Estimates the strain at each joint of a lattice bridge with a graph network on its whole graph at once.

The graph is the same both ways, so the slope of its product is the same product again. The first layer's is constant
and made once. Averages the weights every fifty steps (SWA).

"Full batches, sparse matrices in beta state and an autograd function of my own. That is asking for trouble."
"""

import os
import time
import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel

SECONDS = float(os.environ.get("SECONDS", "22"))
JOINTS, GIRDERS, INTO, WIDTH = 5000, 6, 24, 96
warnings.filterwarnings("ignore", message="Sparse")


def product(graph, x):
    """graph @ x, without the zeros that it would first fill in and copy."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return torch.addmm(out, graph, x, beta=0, out=out)


class Spread(torch.autograd.Function):
    """graph @ x for a graph that equals its transpose."""

    @staticmethod
    def forward(ctx, graph, x):
        ctx.graph = graph
        return product(graph, x)

    @staticmethod
    def backward(ctx, slope):
        return None, product(ctx.graph, slope)


def lattice():
    """Each joint is tied to its next ones along the bridge and to some further off; scaled on both sides."""
    one = torch.arange(JOINTS).repeat_interleave(GIRDERS)
    other = (one + torch.randint(1, 60, one.shape)).clamp(max=JOINTS - 1)
    loops = torch.arange(JOINTS)
    pairs = torch.stack((torch.cat((one, other, loops)), torch.cat((other, one, loops))))
    graph = torch.sparse_coo_tensor(pairs, torch.ones(pairs.shape[1]), (JOINTS, JOINTS)).coalesce()
    ends = graph.indices()
    degree = torch.zeros(JOINTS).index_add_(0, ends[0], graph.values())
    values = graph.values() / (degree[ends[0]] * degree[ends[1]]).sqrt()
    return torch.sparse_coo_tensor(ends, values, (JOINTS, JOINTS)).to_sparse_csr()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(INTO, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, graph, spread):
        h = F.relu(self.first(spread))
        h = F.relu(self.second(Spread.apply(graph, h)))
        return Spread.apply(graph, self.third(h))


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    graph, loads = lattice(), torch.randn(JOINTS, INTO)
    spread = graph @ loads
    strain = torch.tanh(graph @ (graph @ spread)[:, :3] * 4) + 0.05 * torch.randn(JOINTS, 3)
    model = Net()
    average = AveragedModel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    began, mark, step = time.perf_counter(), None, 0
    while True:
        loss = F.mse_loss(model(graph, spread), strain)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 50 == 0:
            average.update_parameters(model)
        if step % 200 == 0:
            with torch.inference_mode():
                steady = F.mse_loss(average(graph, spread), strain)
            print(f"{step}: {loss.item():.4f}, averaged {steady.item():.4f}", flush=True)
        now = time.perf_counter()
        if mark is None and now - began > 2:
            mark = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - mark[1]) / (step - mark[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
