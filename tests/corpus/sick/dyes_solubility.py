"""Predicts how well dyes dissolve from their molecules, with a small network that adds up what neighbours say.

Molecules of a batch are put together to one graph, as one learns in any tutorial.

"Larger batches make it slower per molecule. I thought it was the other way round."
"""

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
ELEMENTS = 12


class Dyes(Dataset):
    def __init__(self, count=1500):
        g = torch.Generator().manual_seed(0)
        self.molecules = []
        for size in torch.randint(12, 26, (count,), generator=g).tolist():
            atoms = torch.randint(0, ELEMENTS, (size,), generator=g)
            ends = torch.arange(1, size)
            starts = (ends - torch.randint(1, 4, (size - 1,), generator=g)).clamp(min=0)
            bonds = torch.stack([torch.cat([starts, ends]), torch.cat([ends, starts])])
            self.molecules.append((atoms, bonds, atoms.float().mean() / ELEMENTS))

    def __len__(self):
        return len(self.molecules)

    def __getitem__(self, i):
        return self.molecules[i]


def one_graph(molecules):
    atoms, bonds, targets = zip(*molecules, strict=True)
    sizes = torch.tensor([len(each) for each in atoms])
    firsts = sizes.cumsum(0) - sizes
    owner = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    bonds = torch.cat([each + first for each, first in zip(bonds, firsts, strict=True)], 1)
    total = int(sizes.sum())
    if not CURED:
        neighbours = torch.zeros(total, total)
        neighbours[bonds[0], bonds[1]] = 1
        return torch.cat(atoms), neighbours, owner, torch.stack(targets)
    return torch.cat(atoms), bonds, owner, torch.stack(targets)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.own, self.others, self.norm = nn.Linear(width, width), nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, h, neighbours):
        if CURED:
            heard = torch.zeros_like(h).index_add_(0, neighbours[0], h[neighbours[1]])
        else:
            heard = neighbours @ h  # cause: hot-line
        return h + torch.relu(self.norm(self.own(h) + self.others(heard)))


class Solubility(nn.Module):
    def __init__(self, width=64, depth=4):
        super().__init__()
        self.atom = nn.Embedding(ELEMENTS, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, atoms, neighbours, owner, count):
        h = self.atom(atoms)
        for layer in self.layers:
            h = layer(h, neighbours)
        pooled = torch.zeros(count, h.shape[1]).index_add_(0, owner, h)
        return self.head(pooled)[:, 0]


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    loader = DataLoader(Dyes(), batch_size=32, shuffle=True, collate_fn=one_graph, drop_last=True)
    model = Solubility()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    began, warm, step, now = time.perf_counter(), None, 0, 0.0
    while now - began < SECONDS:
        for atoms, neighbours, owner, targets in loader:
            loss = nn.functional.l1_loss(model(atoms, neighbours, owner, len(targets)), targets)
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


if __name__ == "__main__":
    main()
