"""Trains a network on molecules of different size; a batch is a list of graphs, each of three tensors.

"I gave it all the workers I have, and now a step takes longer."
"""

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


class Molecules(Dataset):
    def __init__(self):
        draw = torch.Generator().manual_seed(4)
        self.graphs = []
        for _ in range(3000):
            atoms = int(torch.randint(4, 12, (1,), generator=draw))
            bonds = torch.randint(0, atoms, (2, 2 * atoms), generator=draw)
            self.graphs.append((torch.randn(atoms, 16, generator=draw), bonds, torch.tensor(atoms / 12)))

    def __len__(self):
        return 600_000

    def __getitem__(self, index):
        return self.graphs[index % 3000]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.message, self.out = nn.Linear(16, 512), nn.Linear(512, 512), nn.Linear(512, 1)

    def forward(self, atoms, bonds, owner, count):
        h = torch.relu(self.layer(atoms))
        h = torch.relu(h.index_add(0, bonds[1], self.message(h)[bonds[0]]))
        return self.out(torch.zeros(count, 512).index_add(0, owner, h))[:, 0]


torch.set_num_threads(1)
workers = 0 if CURED else 4
loader = DataLoader(  # cause: dataloader-too-many-workers
    Molecules(), 64, shuffle=True, num_workers=workers, collate_fn=list
)
net = Net()
optimizer = torch.optim.Adam(net.parameters())
began, warm, step = time.perf_counter(), None, 0
for graphs in loader:
    sizes = torch.tensor([len(atoms) for atoms, _, _ in graphs])
    starts = sizes.cumsum(0) - sizes
    atoms = torch.cat([atoms for atoms, _, _ in graphs])
    bonds = torch.cat([bonds + start for (_, bonds, _), start in zip(graphs, starts, strict=True)], dim=1)
    owner = torch.repeat_interleave(torch.arange(len(graphs)), sizes)
    energy = torch.stack([energy for _, _, energy in graphs])
    loss = nn.functional.mse_loss(net(atoms, bonds, owner, len(graphs)), energy)
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
