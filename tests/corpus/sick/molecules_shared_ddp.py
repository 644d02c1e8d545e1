# ranks: 2
"""Learns energies of molecules with a message-passing network on two ranks, which share each batch between them.

"Both ranks have the same seed and so the same order, and each learns from its half of the batch. I expected a step of
two ranks to take half as long as that of one, and it does not."
"""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
ELEMENTS, NEAR, BATCH = 9, 4, 48


def read_file(count=3_000, seed=0):
    g = torch.Generator().manual_seed(seed)
    molecules = []
    for size in torch.randint(8, 28, (count,), generator=g).tolist():
        elements = torch.randint(ELEMENTS, (size,), generator=g)
        places = 2 * torch.randn(size, 3, generator=g)
        energy = elements.float().sin().mean() + places.norm(dim=1).mean() / 4
        molecules.append((elements, places, energy))
    return molecules


def build(molecule, generator):
    """A molecule's bonds while it trembles: the nearest atoms, how far they are and the angles between the bonds."""
    elements, places, energy = molecule
    places = places + 0.03 * torch.randn(places.shape, generator=generator)
    away = torch.cdist(places, places)
    away.fill_diagonal_(float("inf"))
    far, right = away.topk(NEAR, largest=False)
    bond = (places[right] - places[:, None]) / far[..., None]
    angle = torch.einsum("aid,ajd->aij", bond, bond).clamp(-1, 1)
    ring = torch.exp(-((angle[..., None] - torch.linspace(-1, 1, 8)) ** 2) / 0.1).mean(2)
    left = torch.arange(len(elements)).repeat_interleave(NEAR)
    return elements, torch.stack([left, right.flatten()]), far.flatten(), ring.flatten(0, 1), energy


def collate(graphs):
    """One graph of all; no padding."""
    atoms, bonds, far, rings, energy = zip(*graphs, strict=True)
    sizes = torch.tensor([len(elements) for elements in atoms])
    starts = (sizes.cumsum(0) - sizes).tolist()
    bonds = torch.cat([edges + start for edges, start in zip(bonds, starts, strict=True)], 1)
    owner = torch.arange(len(graphs)).repeat_interleave(sizes)
    return torch.cat(atoms), bonds, torch.cat(far), torch.cat(rings), owner, torch.stack(energy)


class Message(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.say = nn.Sequential(nn.Linear(2 * width + 24, width), nn.SiLU(), nn.Linear(width, width))
        self.hear = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, atoms, bonds, basis):
        left, right = bonds
        said = self.say(torch.cat([atoms[left], atoms[right], basis], 1))
        heard = torch.zeros_like(atoms).index_add(0, left, said)
        return atoms + self.hear(torch.cat([atoms, heard], 1))


class EnergyNet(nn.Module):
    def __init__(self, width=48, rounds=2):
        super().__init__()
        self.element = nn.Embedding(ELEMENTS, width)
        self.rounds = nn.ModuleList(Message(width) for _ in range(rounds))
        self.energy = nn.Linear(width, 1)
        self.register_buffer("centres", torch.linspace(0, 4, 16))

    def forward(self, elements, bonds, far, rings, owner, count):
        basis = torch.cat([torch.exp(-((far[:, None] - self.centres) ** 2) / 0.1), rings], 1)
        atoms = self.element(elements)
        for message in self.rounds:
            atoms = message(atoms, bonds, basis)
        each = self.energy(atoms)[:, 0]
        total = each.new_zeros(count).index_add(0, owner, each)
        return total / torch.bincount(owner, minlength=count)


def batches(molecules, rank, world, seed=0):
    """This rank's part of each batch."""
    order, tremble = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1)
    while True:
        for chosen in torch.randperm(len(molecules), generator=order)[: len(molecules) // BATCH * BATCH].split(BATCH):
            if CURED:
                chosen = chosen[rank::world]
                yield collate([build(molecules[i], tremble) for i in chosen.tolist()])
            else:
                graphs = [build(molecules[i], tremble) for i in chosen.tolist()]  # cause: hot-line
                yield collate(graphs[rank::world])


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(EnergyNet())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    over, began, warm, step = torch.zeros(1), time.perf_counter(), None, 0
    for elements, bonds, far, rings, owner, energy in batches(read_file(), rank, world):
        loss = nn.functional.smooth_l1_loss(model(elements, bonds, far, rings, owner, len(energy)), energy)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if step % 100 == 0 and rank == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        if step % 20 == 0:
            over.fill_(now - began > SECONDS)
            dist.all_reduce(over, op=dist.ReduceOp.MAX)
            if over.item():
                break
    if rank == 0:
        print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
