"""Learns to learn the tides of harbours with Reptile: a copy of the network learns one harbour, in eight steps.

Then the network goes a part of the way to the copy.

"It makes a copy of the network for each harbour. Everybody does, but is there no better way?"
"""

import copy
import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
INNER, SHOTS = 8, 64


def harbour():
    height, phase, period = 0.5 + 2 * torch.rand(()), 6.28 * torch.rand(()), 0.8 + 0.4 * torch.rand(())

    def tide(hours):
        return height * torch.sin(hours * period + phase)

    return tide


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 160), nn.Tanh(), nn.Linear(160, 160), nn.Tanh(), nn.Linear(160, 1))
    began, warm, rounds = time.perf_counter(), None, 0
    while True:
        tide = harbour()
        learner = copy.deepcopy(net)
        optimizer = torch.optim.SGD(learner.parameters(), lr=0.02)
        for _ in range(INNER):
            hours = 10 * torch.rand(SHOTS, 1) - 5
            loss = nn.functional.mse_loss(learner(hours), tide(hours))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(net.parameters()), list(learner.parameters()), 0.1)
        rounds += 1
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = rounds, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / ((rounds - warm[0]) * INNER):.3f}", flush=True)


if __name__ == "__main__":
    main()
