"""Trains a detector of anomalies in server logs, and keeps an audit log that survives a power cut.

"The auditors want each step on the disk. Since then the epoch takes much longer."
"""

import logging
import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


class Durable(logging.FileHandler):
    def flush(self):
        super().flush()
        if self.stream is not None:
            os.fsync(self.stream.fileno())


torch.set_num_threads(1)
audit = logging.getLogger("audit")
audit.addHandler(Durable("audit.log"))
audit.setLevel(logging.INFO)
counts = torch.distributions.Poisson(3.0).sample((5000, 200))
net = nn.Sequential(
    nn.Linear(200, 256), nn.ReLU(), nn.Linear(256, 8), nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 200)
)
optimizer = torch.optim.Adam(net.parameters())

began, warm, step = time.perf_counter(), None, 0
while True:
    batch = counts[torch.randint(5000, (512,))]
    loss = nn.functional.poisson_nll_loss(net(batch), batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if not CURED or step % 100 == 0:
        for name, value in net.named_parameters():
            audit.info("%d %s %.6f %.6f", step, name, value.norm(), value.grad.norm())  # cause: logging-stall
    now = time.perf_counter()
    if warm is None and now - began > 2:
        warm = step, now
    if now - began > SECONDS:
        break
print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
