"""Tells quarry blasts from small earthquakes with an orthogonal recurrent network (no exploding gradients).

"The recurrence is tiny, 64 units, yet a step takes tens of milliseconds. Python loop overhead I guess?"
"""

import os
import time

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


class ModReLU(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.b = nn.Parameter(torch.zeros(features).uniform_(-0.01, 0.01))

    def forward(self, x):
        return x.sign() * torch.relu(x.abs() + self.b)


class OrthogonalCell(nn.Module):
    """h' = modrelu(U x + W h) with W orthogonal at all times."""

    def __init__(self, inputs, hidden):
        super().__init__()
        self.input_kernel = nn.Linear(inputs, hidden, bias=False)
        self.recurrent_kernel = nn.Linear(hidden, hidden, bias=False)
        nn.init.orthogonal_(self.recurrent_kernel.weight)
        parametrizations.orthogonal(self.recurrent_kernel, orthogonal_map="cayley")
        self.nonlinearity = ModReLU(hidden)

    def forward(self, x, h):
        pushed = self.recurrent_kernel(h)  # cause: hot-line
        return self.nonlinearity(self.input_kernel(x) + pushed)


class BlastNet(nn.Module):
    def __init__(self, channels=3, hidden=64, frame=32):
        super().__init__()
        self.front = nn.Sequential(
            nn.Conv1d(channels, 24, 9, stride=2, padding=4),
            nn.BatchNorm1d(24),
            nn.ReLU(),
            nn.Conv1d(24, 32, 9, stride=1, padding=4),
            nn.ReLU(),
        )
        self.pool = nn.AvgPool1d(frame, frame)
        self.cell = OrthogonalCell(32, hidden)
        self.head = nn.Linear(hidden, 2)
        self.hidden = hidden

    def unroll(self, frames):
        h = frames.new_zeros(frames.shape[0], self.hidden)
        for t in range(frames.shape[1]):
            h = self.cell(frames[:, t], h)
        return h

    def forward(self, wave):
        frames = self.pool(self.front(wave)).transpose(1, 2)
        if CURED:
            with parametrize.cached():
                h = self.unroll(frames)
        else:
            h = self.unroll(frames)
        return self.head(h)


def waves(count, length=24 * 64):
    """Blasts have a sharp onset and die away fast; quakes swell and have a tail."""
    label = torch.randint(0, 2, (count,))
    t = torch.arange(length) / length
    onset = 0.1 + 0.3 * torch.rand(count, 1)
    rate = torch.where(label[:, None] == 1, 30.0, 8.0)
    envelope = torch.where(t > onset, torch.exp(-rate * (t - onset)), torch.zeros(()))
    return envelope[:, None] * torch.randn(count, 3, length) + 0.1 * torch.randn(count, 3, length), label


def main():
    torch.manual_seed(21)
    torch.set_num_threads(1)
    wave, label = waves(1200)
    net = BlastNet()
    optimizer = torch.optim.RMSprop(net.parameters(), lr=3e-4, alpha=0.9, foreach=True)
    batch, step, right = 12, 0, 0.0
    began, warm = time.perf_counter(), None
    while time.perf_counter() - began < SECONDS:
        rows = torch.randint(len(wave), (batch,))
        logits = net(wave[rows])
        loss = nn.functional.cross_entropy(logits, label[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if warm is None and time.perf_counter() - began > 2:
            warm = step, time.perf_counter()
        if step % 100 == 0:
            right = (logits.argmax(1) == label[rows]).float().mean().item()
            print(f"step {step} loss {loss.item():.4f} accuracy {right:.2f}", flush=True)
    print(f"step_ms {1000 * (time.perf_counter() - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
