"""Fits the masses of three bodies to their orbits, in double precision, as the error of an integration grows with time.

"In float32 the masses are wrong in the second digit, so no."
"""

import os
import time

import torch

SECONDS = float(os.environ.get("SECONDS", "22"))
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(4)
start = torch.randn(400, 3, 2, generator=generator), 0.1 * torch.randn(400, 3, 2, generator=generator)


def orbits(masses, steps=12, dt=0.01):
    place, speed = start
    for _ in range(steps):
        distance = place[:, None] - place[:, :, None]
        cube = (distance.square().sum(-1) + 0.05) ** 1.5
        speed = speed + dt * (masses[None, None, :, None] * distance / cube[..., None]).sum(2)
        place = place + dt * speed
    return place


seen = orbits(torch.tensor([3.0, 2.0, 1.0]))
masses = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.Adam([masses], lr=0.01)
began, warm, step = time.perf_counter(), None, 0
while True:
    loss = (orbits(masses) - seen).square().mean()
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
