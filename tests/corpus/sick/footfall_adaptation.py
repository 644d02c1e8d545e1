"""Counts walkers from floor sensors: labelled data of the laboratory, unlabelled data of a shopping street (DANN).

"The two sets have different lengths, zip() stops at the shorter one. next(iter(...)) gives me one
random batch of each, which is all I need."
"""

import os
import time

import torch
from torch import nn
from torch.autograd import Function
from torch.utils.data import DataLoader, TensorDataset

SECONDS = float(os.environ.get("SECONDS", 22))
CURED = os.environ.get("CURED") == "1"
SENSORS, TICKS = 4, 12


class Reverse(Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.weight * grad, None


def recordings(n, walkers, shift, seed):
    g = torch.Generator().manual_seed(seed)
    count = torch.randint(0, walkers, (n,), generator=g)
    signal = torch.randn(n, SENSORS * TICKS, generator=g) * 0.5 + shift
    signal += torch.sin(torch.arange(SENSORS * TICKS) * 0.2 * (1 + count[:, None]))
    return signal, count


class BatchSource:
    """Endless batches out of a loader."""

    def __init__(self, loader):
        self.loader = loader
        self.running = None

    def draw(self):
        if not CURED:
            return next(iter(self.loader))  # cause: hot-line
        if self.running is None:
            self.running = iter(self.loader)
        try:
            return next(self.running)
        except StopIteration:
            self.running = iter(self.loader)
            return next(self.running)


class Adapter(nn.Module):
    def __init__(self, width=512, classes=6):
        super().__init__()
        self.features = nn.Sequential(
            nn.Linear(SENSORS * TICKS, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
        )
        self.counter = nn.Linear(width, classes)
        self.domain = nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, 1))


def training_step(model, lab, street, weight):
    signal, count = lab
    (other,) = street
    h = model.features(torch.cat([signal, other]))
    task = nn.functional.cross_entropy(model.counter(h[: len(signal)]), count)
    domain = model.domain(Reverse.apply(h, weight)).squeeze(1)
    truth = torch.cat([torch.zeros(len(signal)), torch.ones(len(other))])
    return task + nn.functional.binary_cross_entropy_with_logits(domain, truth), task


def main():
    torch.set_num_threads(2)
    torch.manual_seed(0)
    lab = DataLoader(TensorDataset(*recordings(90_000, 6, 0.0, seed=1)), batch_size=128, shuffle=True, drop_last=True)
    street_signal, _ = recordings(160_000, 6, 0.4, seed=2)
    street = DataLoader(TensorDataset(street_signal), batch_size=128, shuffle=True, drop_last=True)
    lab, street = BatchSource(lab), BatchSource(street)
    model = Adapter()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    start, ends, step = time.perf_counter(), [], 0
    while time.perf_counter() - start < SECONDS:
        weight = min(1.0, step / 1000)
        loss, task = training_step(model, lab.draw(), street.draw(), weight)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ends.append(time.perf_counter())
        step += 1
        if step % 500 == 0:
            print(f"step {step} task {task.item():.3f} total {loss.item():.3f}")
    ends = ends[step // 10 :]
    print(f"step_ms {(ends[-1] - ends[0]) / (len(ends) - 1) * 1e3:.3f}")


if __name__ == "__main__":
    main()
