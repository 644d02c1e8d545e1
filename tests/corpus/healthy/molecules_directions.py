"""Predicts which of eight classes a molecule is in, with a network that passes messages along directions.

"Each batch is another set of molecules, so its graph has to be normalised anew. Is there nothing to save?"
"""

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
ATOMS = 20


class Molecules(Dataset):
    def __init__(self, count=4_000):
        generator = torch.Generator().manual_seed(0)
        self.positions = torch.randn(count, ATOMS, 3, generator=generator)
        self.kinds = torch.randint(0, 6, (count, ATOMS), generator=generator)
        self.classes = torch.randint(0, 8, (count,), generator=generator)

    def __len__(self):
        return len(self.classes)

    def __getitem__(self, row):
        return self.positions[row], self.kinds[row], self.classes[row]


def neighbours(distances, cutoff=1.8):
    near = (distances < cutoff).float()
    degree = near.sum(-1, keepdim=True).clamp(min=1.0)
    return near / degree


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * width + 1, width), nn.SiLU(), nn.Linear(width, width))
        self.weight = nn.Linear(width, 1)

    def forward(self, h, positions):
        gaps = positions[:, :, None] - positions[:, None]
        distances = gaps.pow(2).sum(-1, keepdim=True)
        a = neighbours(distances.squeeze(-1).sqrt()).unsqueeze(-1)
        pairs = torch.cat(
            [h[:, :, None].expand(-1, -1, ATOMS, -1), h[:, None].expand(-1, ATOMS, -1, -1), distances], -1
        )
        messages = self.message(pairs) * a
        directions = gaps / (distances + 1e-6).sqrt()
        return h + messages.sum(2), positions + 0.1 * (directions * self.weight(messages)).sum(2)


class Net(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.kinds = nn.Embedding(6, width)
        self.layers = nn.ModuleList([Layer(width) for _ in range(3)])
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(width, 8)

    def forward(self, positions, kinds):
        h = self.kinds(kinds)
        for layer in self.layers:
            h, positions = layer(h, positions)
        return self.out(self.drop(h.mean(1)))


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    began, warm, step, right = time.perf_counter(), None, 0, 0.0
    while True:
        for positions, kinds, classes in DataLoader(Molecules(), batch_size=32, shuffle=True, drop_last=True):
            # Two passes with different dropout, which are to agree: R-Drop.
            logits, again = net(positions, kinds), net(positions, kinds)
            loss = nn.functional.cross_entropy(logits, classes) + nn.functional.cross_entropy(again, classes)
            loss = loss + (logits.log_softmax(1) - again.log_softmax(1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right = 0.98 * right + 0.02 * (logits.argmax(1) == classes).float().mean().item()
            step += 1
            now = time.perf_counter()
            if warm is None and now - began > 2:
                warm = step, now
            if now - began > SECONDS:
                print(f"accuracy {right:.3f}")
                print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
                return


if __name__ == "__main__":
    main()
