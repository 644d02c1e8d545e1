"""Names mosses from photographs with a head on top of a frozen backbone of convolutions.

There are a few hundred photographs, seen again in every epoch as they are, without augmentation.

"Only the head has gradients; I checked requires_grad twice. I had hoped that freezing nearly everything would make it
nearly free."
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "20"))
CURED = os.environ.get("CURED") == "1"
PHOTOS, SIDE, MOSSES, BATCH = 640, 32, 14, 32


def backbone():
    """Stands for a network that was trained elsewhere."""
    network = nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.Conv2d(24, 48, 3, stride=2, padding=1),
        nn.BatchNorm2d(48),
        nn.ReLU(),
        nn.Conv2d(48, 64, 3, stride=2, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
    )
    return network.eval().requires_grad_(False)


class Head(nn.Module):
    """Attends over the places of the feature map."""

    def __init__(self, channels=64):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(channels, 4, 128, dropout=0.0, batch_first=True)
        self.name = nn.Linear(channels, MOSSES)

    def forward(self, features):
        return self.name(self.layer(features.flatten(2).transpose(1, 2)).mean(1))


def photographs():
    g = torch.Generator().manual_seed(12)
    moss = torch.randint(MOSSES, (PHOTOS,), generator=g)
    look = torch.randn(MOSSES, 3, SIDE, SIDE, generator=g)
    return 0.5 * look[moss] + torch.randn(PHOTOS, 3, SIDE, SIDE, generator=g), moss


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    frozen, head = backbone(), Head()
    photos, mosses = photographs()
    kept = None
    if CURED:
        with torch.no_grad():
            kept = torch.cat([frozen(part) for part in photos.split(BATCH)])
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)
    step, mark, epoch, done = 0, None, 0, False
    began = time.perf_counter()
    while not done:
        for rows in torch.randperm(PHOTOS).split(BATCH):
            if CURED:
                features = kept[rows]
            else:
                with torch.no_grad():
                    features = frozen(photos[rows])  # cause: none-yet features of a frozen network
            loss = nn.functional.cross_entropy(head(features), mosses[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            now = time.perf_counter()
            if mark is None and now - began > 2:
                mark = step, now
            done = now - began > SECONDS
            if done:
                break
        epoch += 1
        if epoch % 10 == 0:
            print(f"epoch {epoch}: {loss.item():.4f}", flush=True)
    print(f"step_ms {1000 * (now - mark[1]) / (step - mark[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
