"""Fits how stiff strands of kelp are to films of them, through a simulation that autograd goes through.

"The simulation is a loop of 40 steps in Python. The profiler of a colleague wants it to be one operation."
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
STRANDS, KNOTS, STEPS = 48, 10, 40


class Kelp:
    """Strands of knots, fixed at the ground, in a current."""

    def __init__(self, stiff, drag):
        self.stiff, self.drag = stiff, drag
        self.at = torch.arange(1.0, KNOTS + 1).repeat(STRANDS, 1)
        self.lean = torch.zeros(STRANDS, KNOTS)
        self.speed = torch.zeros(STRANDS, KNOTS)

    def advance(self, current):
        below = nn.functional.pad(self.lean[:, :-1], (1, 0))
        above = nn.functional.pad(self.lean[:, 1:], (0, 1))
        tight = self.stiff * (below + above - 2 * self.lean)
        flow = current[:, None] * torch.log1p(self.at) - self.speed
        force = tight + self.drag * flow * flow.abs() - 0.2 * self.lean
        self.speed = self.speed + 0.05 * force
        self.lean = self.lean + 0.05 * self.speed


def film(stiff, drag, currents):
    kelp = Kelp(stiff, drag)
    for current in currents:
        kelp.advance(current)
    return kelp.lean


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.no_grad():
        currents = torch.rand(STEPS, STRANDS)
        seen = film(torch.rand(STRANDS, 1) + 1, torch.rand(STRANDS, 1), currents)
    stiff = nn.Parameter(torch.full((STRANDS, 1), 1.2))
    drag = nn.Parameter(torch.full((STRANDS, 1), 0.3))
    optimizer = torch.optim.Adam([stiff, drag], lr=0.01)
    began, warm, step = time.perf_counter(), None, 0
    while True:
        loss = (film(stiff, drag, currents) - seen).square().mean()
        optimizer.zero_grad()
        loss.backward()
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
