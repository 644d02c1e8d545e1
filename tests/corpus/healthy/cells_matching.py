"""Finds cells in generated microscope features with a set prediction head and Hungarian matching.

Each query predicts a position and a class; the assignment of queries to cells is solved by scipy for each image.

"There is a Python loop over the images and a trip to numpy in each step. Is that what I should get rid of?"
"""

import os
import time

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
IMAGES, QUERIES, PLACES, DIM, KINDS = 8, 24, 64, 96, 3


class Decoder(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.embed = nn.Linear(KINDS + 2, DIM)
        self.query = nn.Parameter(torch.randn(QUERIES, DIM))
        self.layers = nn.ModuleList(
            nn.TransformerDecoderLayer(DIM, 4, 4 * DIM, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.kind, self.place = nn.Linear(DIM, KINDS + 1), nn.Linear(DIM, 2)

    def forward(self, feats):
        memory = self.embed(feats)
        q = self.query.expand(len(feats), -1, -1)
        for layer in self.layers:
            q = layer(q, memory)
        return self.kind(q), self.place(q).sigmoid()


def sample(gen):
    """Feature maps (flattened 8x8) in which each cell lights up its surroundings."""
    side = torch.linspace(0, 1, 8)
    grid = torch.cartesian_prod(side, side)
    counts = torch.randint(4, 13, (IMAGES,), generator=gen).tolist()
    feats, cells = [], []
    for n in counts:
        at = torch.rand(n, 2, generator=gen)
        kind = torch.randint(KINDS, (n,), generator=gen)
        glow = torch.exp(-torch.cdist(grid, at).square() / 0.01)
        feats.append(torch.cat([glow @ F.one_hot(kind, KINDS).float(), grid], 1))
        cells.append((at, kind))
    return torch.stack(feats), cells


@torch.no_grad()
def match(logits, places, cells):
    sizes = [len(k) for _, k in cells]
    at, kind = torch.cat([a for a, _ in cells]), torch.cat([k for _, k in cells])
    cost = torch.cdist(places.flatten(0, 1), at, p=1) * 5 - logits.softmax(-1).flatten(0, 1)[:, kind]
    cost = cost.view(IMAGES, QUERIES, -1)
    rows, cols, img, offset = [], [], [], 0
    for i, part in enumerate(cost.split(sizes, -1)):
        r, c = linear_sum_assignment(part[i].numpy())
        rows.append(torch.from_numpy(r))
        cols.append(torch.from_numpy(c) + offset)
        img.append(torch.full((len(r),), i))
        offset += sizes[i]
    return torch.cat(img), torch.cat(rows), at[torch.cat(cols)], kind[torch.cat(cols)]


def set_loss(logits, places, cells):
    img, row, at, kind = match(logits, places, cells)
    target = torch.full((IMAGES, QUERIES), KINDS)
    target[img, row] = kind
    return F.cross_entropy(logits.flatten(0, 1), target.flatten()) + 5 * F.l1_loss(places[img, row], at)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    gen = torch.Generator().manual_seed(21)
    model = Decoder()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-4, fused=True)
    count, early, begun = 0, None, time.perf_counter()
    while True:
        feats, cells = sample(gen)
        loss = set_loss(*model(feats), cells)
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        count += 1
        if count % 100 == 0:
            print(f"{count} {loss.item():.3f}")
        now = time.perf_counter() - begun
        if early is None and now > 2:
            early = count, now
        if now > SECONDS:
            break
    print(f"step_ms {(now - early[1]) / (count - early[0]) * 1000:.3f}", flush=True)
