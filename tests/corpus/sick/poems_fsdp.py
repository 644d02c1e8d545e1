# ranks: 2
"""Trains a small language model of poems with FSDP2 and writes the whole model, gathered from both ranks.

"Sharding made it slow."
"""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


class Poet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(2000, 192)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(192, 4, 384, batch_first=True) for _ in range(2))
        self.out = nn.Linear(192, 2000)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.out(x)


dist.init_process_group("gloo")
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
poet = Poet()
for layer in poet.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(poet, mesh=mesh)
optimizer = torch.optim.AdamW(poet.parameters(), lr=1e-3)
whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
began, warm, step = time.perf_counter(), None, 0
while True:
    verse = torch.randint(2000, (4, 33))
    loss = nn.functional.cross_entropy(poet(verse[:, :-1]).flatten(0, 1), verse[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if not CURED or step % 100 == 0:
        state = get_model_state_dict(poet, options=whole)  # cause: checkpoint-stall or hot-line
        if dist.get_rank() == 0:
            torch.save(state, "poet.pt")  # cause: checkpoint-stall or hot-line
    now = time.perf_counter()
    if warm is None and now - began > 2:
        warm = step, now
    if step % 10 == 0:
        over = torch.tensor(float(now - began > SECONDS))
        dist.all_reduce(over)
        if over:
            break
if dist.get_rank() == 0:
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
dist.destroy_process_group()
