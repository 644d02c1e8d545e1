"""Batch-hard triplet embedding of bird photographs.

"Everything is vectorised, no Python loop anywhere, and the loss has not a single
parameter. So the time must be in the conv net; I am thinking of a smaller
backbone."
"""

import os
import time

import torch
import torch.nn as nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"

SPECIES, PER_SPECIES = 48, 4
EMBED = 192


class Aviary:
    """P species x K photographs per batch."""

    def __init__(self, species=150, photos=12, size=24):
        g = torch.Generator().manual_seed(9)
        proto = torch.randn(species, 1, 3, size, size, generator=g)
        self.images = proto + 1.2 * torch.randn(species, photos, 3, size, size, generator=g)

    def batch(self):
        who = torch.randperm(len(self.images))[:SPECIES]
        which = torch.rand(SPECIES, self.images.shape[1]).argsort(1)[:, :PER_SPECIES]
        x = self.images[who[:, None], which]
        return x.flatten(0, 1), who.repeat_interleave(PER_SPECIES)


def backbone():
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, stride=2, padding=1),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.Conv2d(24, 48, 3, stride=2, padding=1),
        nn.BatchNorm2d(48),
        nn.ReLU(),
        nn.Conv2d(48, 64, 3, stride=2, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 9, EMBED),
    )


def pairwise_sq_distance(e):
    if CURED:
        sq = e.pow(2).sum(1)
        return (sq[:, None] + sq[None, :] - 2 * e @ e.T).clamp(min=0)
    return (e.unsqueeze(0) - e.unsqueeze(1)).pow(2).sum(-1)  # cause: hot-line


def batch_hard(e, species, margin=0.3):
    d = (pairwise_sq_distance(e) + 1e-8).sqrt()
    same = species[:, None] == species[None, :]
    hardest_positive = d.masked_fill(~same, 0).amax(1)
    hardest_negative = d.masked_fill(same, float("inf")).amin(1)
    return (hardest_positive - hardest_negative + margin).relu().mean()


if __name__ == "__main__":
    torch.manual_seed(4)
    birds = Aviary()
    net = backbone()
    opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    start = time.time()
    since, counted, step = None, 0, 0
    while time.time() - start < SECONDS:
        x, species = birds.batch()
        e = nn.functional.normalize(net(x), dim=1)
        loss = batch_hard(e, species)
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        if since is not None:
            counted += 1
        elif time.time() - start > 2:
            since = time.time()
        if step % 100 == 0:
            print(f"step {step:5d}  triplet loss {loss.item():.4f}")
    print(f"step_ms {(time.time() - since) / counted * 1000:.3f}")
