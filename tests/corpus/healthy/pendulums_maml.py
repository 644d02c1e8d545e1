"""Learns to learn the swing of pendulums: MAML, two inner steps on each of four pendulums, the outer step through them.

"Each step builds the graph of the gradients of the gradients, and it loops over the tasks in Python."
"""

import os
import time

import torch
from torch import nn
from torch.func import functional_call

SECONDS = float(os.environ.get("SECONDS", "22"))
INNER, TASKS, RATE = 2, 4, 0.05


def pendulum(count=256):
    length, phase = torch.rand(1) + 0.5, torch.rand(1) * 6
    times = torch.rand(2 * count, 1) * 6
    swing = torch.sin(times / length.sqrt() + phase)
    return times[:count], swing[:count], times[count:], swing[count:]


def adapted(model, times, swing):
    weights = dict(model.named_parameters())
    for _ in range(INNER):
        loss = nn.functional.mse_loss(functional_call(model, weights, (times,)), swing)
        gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        weights = {name: w - RATE * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
    return weights


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    began, warm, step = time.perf_counter(), None, 0
    while True:
        optimizer.zero_grad()
        total = torch.zeros(())
        for _ in range(TASKS):
            times, swing, later, target = pendulum()
            weights = adapted(model, times, swing)
            loss = nn.functional.mse_loss(functional_call(model, weights, (later,)), target) / TASKS
            loss.backward()
            total += loss.detach()
        optimizer.step()
        step += 1
        if step % 100 == 0:
            print(f"step {step} loss {total.item():.4f}", flush=True)
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
