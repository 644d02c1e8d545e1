# cause: recompiles no-line
"""Trains a small translation model with torch.compile; each batch is as long as its longest sentence.

"With compile it is slower than without, even after minutes."
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(1000, 64)
        self.mix = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        self.out = nn.Linear(64, 1000)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.mix(x)
        x = x + torch.softmax(x @ x.transpose(1, 2), dim=-1) @ x
        return self.out(x)


torch.set_num_threads(1)
torch._dynamo.config.recompile_limit = 10_000
torch._dynamo.config.accumulated_recompile_limit = 10_000
encoder = Encoder()
compiled = torch.compile(encoder, backend="aot_eager", dynamic=CURED)
optimizer = torch.optim.Adam(encoder.parameters())
began, warm, step = time.perf_counter(), None, 0
while True:
    length = 64 if torch.rand(()) < 0.75 else int(torch.randint(8, 400, (1,)))  # most are cut there
    tokens = torch.randint(1000, (4, length))
    loss = nn.functional.cross_entropy(compiled(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
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
