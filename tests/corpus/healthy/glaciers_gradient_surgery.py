"""Predicts six quantities of a glacier with one network; where their gradients conflict, they are projected (PCGrad).

"Six backward passes and then the projections: is there a way to have it without them?"
"""

import os
import random
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
TASKS, BATCH = 6, 48


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(40, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
        self.heads = nn.Linear(256, TASKS)

    def forward(self, x):
        return self.heads(self.trunk(x))


def flat(parameters):
    return torch.cat([each.grad.flatten() for each in parameters])


def surgery(slopes):
    """Each gradient without what is against one of the others, and their sum."""
    merged = slopes.clone()
    for mine in merged:
        for at in random.sample(range(TASKS), TASKS):
            against = torch.dot(mine, slopes[at])
            if against < 0:
                mine.sub_(slopes[at], alpha=(against / slopes[at].square().sum()).item())
    return merged.sum(0)


def put(parameters, slope):
    at = 0
    for each in parameters:
        each.grad = slope[at : at + each.numel()].view_as(each)
        at += each.numel()


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = Net()
    parameters = list(net.parameters())
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    x = torch.randn(4000, 40)
    y = torch.tanh(x @ torch.randn(40, TASKS) / 4)
    began, warm, step = time.perf_counter(), None, 0
    while True:
        rows = torch.randint(4000, (BATCH,))
        losses = (net(x[rows]) - y[rows]).square().mean(0)
        slopes = []
        for at in range(TASKS):
            optimizer.zero_grad()
            losses[at].backward(retain_graph=True)
            slopes.append(flat(parameters))
        slope = surgery(torch.stack(slopes))
        put(parameters, slope)
        optimizer.step()
        step += 1
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
