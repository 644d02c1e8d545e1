# ranks: 2
"""Trains a forecast of tides, sharded over two ranks with FSDP2, and writes its shards every hundred steps.

"Communication is a good part of the step: the model is small. It fits on one machine, but this is a rehearsal."
"""

import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

SECONDS = float(os.environ.get("SECONDS", "22"))

dist.init_process_group("gloo")
mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
net = nn.Sequential(nn.Linear(336, 768), nn.GELU(), nn.Linear(768, 768), nn.GELU(), nn.Linear(768, 48))
for layer in net:
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mesh=mesh)
fully_shard(net, mesh=mesh)
optimizer = torch.optim.AdamW(net.parameters())
folder = [tempfile.gettempdir() if dist.get_rank() else tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
began, warm, step = time.perf_counter(), None, 0
while True:
    tide = torch.rand(256, 384)
    loss = nn.functional.l1_loss(net(tide[:, :336]), tide[:, 336:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if step % 200 == 0:
        dcp.save({"net": net.state_dict()}, checkpoint_id=os.path.join(folder[0], f"step-{step}"))
    now = time.perf_counter()
    if warm is None and now - began > 2:
        warm = step, now
    if step % 25 == 0:
        over = torch.tensor(float(now - began > SECONDS))
        dist.all_reduce(over)
        if over:
            break
if dist.get_rank() == 0:
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
dist.destroy_process_group()
