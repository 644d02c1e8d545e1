"""Forecasts passengers at the stations of a metro with a graph convolution network.

"I doubled the batch and the time of a step hardly changed."
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
STATIONS = 560


def random_lines(seed=0):
    generator = torch.Generator().manual_seed(seed)
    adjacency = (torch.rand(STATIONS, STATIONS, generator=generator) < 0.01).float()
    return ((adjacency + adjacency.t()) > 0).float()


def normalised(adjacency):
    adjacency = adjacency + torch.eye(len(adjacency))
    root = torch.diag(adjacency.sum(1).pow(-0.5))
    return root @ adjacency @ root  # cause: hot-line


class GraphConvolution(nn.Module):
    def __init__(self, inside, outside):
        super().__init__()
        self.linear = nn.Linear(inside, outside)

    def forward(self, x, adjacency):
        return torch.relu(adjacency @ self.linear(x))


class Metro(nn.Module):
    def __init__(self, adjacency, width=32):
        super().__init__()
        self.register_buffer("adjacency", adjacency)
        self.register_buffer("ready", normalised(adjacency))
        self.first = GraphConvolution(12, width)
        self.second = GraphConvolution(width, width)
        self.out = nn.Linear(width, 3)

    def forward(self, x):
        adjacency = self.ready if CURED else normalised(self.adjacency)  # cause: hot-line
        return self.out(self.second(self.first(x, adjacency), adjacency))


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    counts = torch.rand(600, STATIONS).cumsum(0) % 1
    model = Metro(random_lines())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    began, warm, step, mean = time.perf_counter(), None, 0, torch.zeros(())
    while True:
        hours = torch.randint(0, 580, (8,))
        window = counts[hours[:, None] + torch.arange(15)].transpose(1, 2)
        loss = nn.functional.l1_loss(model(window[..., :12]), window[..., 12:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean.lerp_(loss.detach(), 0.01)
        step += 1
        if step % 250 == 0:
            print(f"step {step} loss {mean.item():.4f}", flush=True)
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
