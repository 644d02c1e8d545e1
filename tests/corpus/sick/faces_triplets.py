"""Trains embeddings of faces with a triplet loss that looks at each face of the batch in turn.

"The network is done in a moment; then it thinks."
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


def triplet_loss(faces, people, margin=0.2):
    if CURED:
        distance = (faces[:, None] - faces[None]).square().sum(2)
        same = people[:, None] == people[None]
        far = distance.masked_fill(~same, -1.0).amax(1)
        near = distance.masked_fill(same, 1e9).amin(1)
        return (far - near + margin).clamp(min=0).mean()
    losses = []
    for face, person in zip(faces, people, strict=True):  # cause: small-operations-loop
        distance = (faces - face).square().sum(1)
        far = distance[people == person].max()
        near = distance[people != person].min()
        losses.append((far - near + margin).clamp(min=0))
    return torch.stack(losses).mean()


torch.set_num_threads(1)
net = nn.Sequential(nn.Linear(900, 512), nn.ReLU(), nn.Linear(512, 64))
optimizer = torch.optim.Adam(net.parameters())
photos, owners = torch.rand(2000, 900), torch.arange(2000) % 20
began, warm, step = time.perf_counter(), None, 0
while True:
    rows = torch.randint(2000, (128,))
    loss = triplet_loss(nn.functional.normalize(net(photos[rows])), owners[rows])
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
