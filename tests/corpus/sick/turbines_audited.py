"""Trains a forecast of wind turbines from windows of their history, and writes down what it forecast for each.

"The auditors want all of it, in a file that does not grow for ever."
"""

import logging
import logging.handlers
import os
import tempfile
import time

import numpy as np
import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
EVERY = 100 if CURED else 1

log = logging.getLogger("turbines.forecast")
log.setLevel(logging.INFO)
log.propagate = False
handler = logging.handlers.RotatingFileHandler(
    os.path.join(tempfile.mkdtemp(), "forecast.log"), maxBytes=200_000, backupCount=20
)
handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-8s %(name)s [%(process)d] %(message)s"))
log.addHandler(handler)


def windows(history, length, ahead, batch, seed=0):
    """Random windows, as numbers of turbines, what was, and what came."""
    draw = np.random.default_rng(seed)
    views = np.lib.stride_tricks.sliding_window_view(history, length + ahead, axis=1)
    while True:
        turbine = draw.integers(len(history), size=batch)
        rows = torch.from_numpy(views[turbine, draw.integers(views.shape[1], size=batch)])
        yield turbine.tolist(), rows[:, :length], rows[:, length:]


def report(step, turbines, forecast, truth):
    misses = (forecast - truth).abs().mean(1)
    for turbine, power, miss in zip(turbines, forecast[:, 0].tolist(), misses.tolist(), strict=True):
        log.info("step %d turbine %d next %.4f missed by %.4f", step, turbine, power, miss)  # cause: logging-stall


torch.set_num_threads(1)
power = np.random.default_rng(7).random((60, 5000), dtype=np.float32).cumsum(1) % 3
model = nn.Sequential(nn.Linear(96, 512), nn.ELU(), nn.Linear(512, 512), nn.ELU(), nn.Linear(512, 24))
optimizer = torch.optim.NAdam(model.parameters(), lr=5e-4)
began, warm = time.perf_counter(), None
for step, (turbines, before, after) in enumerate(windows(power, 96, 24, 256), start=1):
    forecast = model(before)
    loss = nn.functional.huber_loss(forecast, after)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % EVERY == 0:
        report(step, turbines, forecast.detach(), after)
    now = time.perf_counter()
    if warm is None and now - began > 2:
        warm = step, now
    if now - began > SECONDS:
        break
print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
