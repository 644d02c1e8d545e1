# ranks: 2
"""Trains a language model of reports with FullyShardedDataParallel, a unit for each block of the model.

As its documentation advises, an auto_wrap_policy names the class of the blocks.

"It is a rehearsal on the CPU of what will run on eight GPUs, so the blocks are small."
"""

import functools
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

SECONDS = float(os.environ.get("SECONDS", "22"))
WORDS, WIDTH = 500, 64


class Block(nn.TransformerEncoderLayer):
    def __init__(self):
        super().__init__(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.out = nn.Linear(WIDTH, WORDS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(64))

    def forward(self, words):
        x = self.words(words)
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return self.out(x)


dist.init_process_group("gloo")
torch.manual_seed(5)
policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
model = FullyShardedDataParallel(Model(), auto_wrap_policy=policy, device_id=torch.device("cpu"))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
reports = torch.randint(WORDS, (100_000,), generator=torch.Generator().manual_seed(dist.get_rank()))
began, warm, step = time.perf_counter(), None, 0
while True:
    starts = torch.randint(len(reports) - 65, (24,))
    rows = reports[starts[:, None] + torch.arange(65)]
    loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    now = time.perf_counter()
    if warm is None and now - began > 2:
        warm = step, now
    over = torch.tensor([float(now - began > SECONDS)])
    if step % 20 == 0:
        dist.all_reduce(over)
        if over.item():
            break
print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
dist.destroy_process_group()
