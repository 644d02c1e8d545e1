"""Trains a language model of characters of novels, and can tell how the gradients look when one debugs it.

"Debug messages are off in production, nothing is written. I have checked."
"""

import logging
import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"

logging.basicConfig(level=logging.INFO)
log = logging.getLogger("novels")


class Novelist(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(96, 96)
        self.read = nn.GRU(96, 160, batch_first=True)
        self.tell = nn.Linear(160, 96)

    def forward(self, characters):
        return self.tell(self.read(self.embed(characters))[0])


def described(gradient):
    return " ".join(f"{value:+.3e}" for value in gradient.flatten().tolist())  # cause: hot-line


def show(step, model):
    if CURED and not log.isEnabledFor(logging.DEBUG):
        return
    log.debug("step %d, gradient of the output: %s", step, described(model.tell.weight.grad))


torch.set_num_threads(1)
text = torch.randint(96, (200_000,))
novelist = Novelist()
optimizer = torch.optim.RMSprop(novelist.parameters(), 1e-3)
began, warm, step = time.perf_counter(), None, 0
while True:
    rows = torch.randint(199_900, (16, 1)) + torch.arange(33)
    characters = text[rows]
    loss = nn.functional.cross_entropy(novelist(characters[:, :-1]).flatten(0, 1), characters[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(novelist.parameters(), 1.0)
    show(step, novelist)
    optimizer.step()
    step += 1
    if step % 200 == 0:
        log.info("step %d, loss %.3f", step, loss.item())
    now = time.perf_counter()
    if warm is None and now - began > 2:
        warm = step, now
    if now - began > SECONDS:
        break
print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
