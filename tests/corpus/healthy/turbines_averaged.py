"""Recognises faults of turbines on spectrograms, with averaged weights (SWA) and a whitening optimizer.

Every epoch ends with the accuracy of the averaged network on what was held out; the best one goes to the turbines.

"Is the averaging slowing me down, or Shampoo? I read about both."
"""

import os
import time

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

SECONDS = float(os.environ.get("SECONDS", "22"))
COUNT, HELD_OUT, BATCH, BANDS, FRAMES, FAULTS = 1920, 128, 32, 32, 48, 6


class Whitening(torch.optim.Optimizer):
    """Shampoo for what comes out of a layer; its roots are kept for 50 steps"""

    def __init__(self, params, lr=0.02, momentum=0.9, every=50):
        super().__init__(params, {"lr": lr, "momentum": momentum, "every": every})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state, flat = self.state[p], p.grad.reshape(len(p), -1)
                if not state:
                    state.update(step=0, momentum=torch.zeros_like(p), factor=1e-2 * torch.eye(len(p)))
                state["factor"].mul_(0.99).addmm_(flat, flat.T)
                if state["step"] % group["every"] == 0:
                    values, vectors = torch.linalg.eigh(state["factor"])
                    state["root"] = (vectors * values.clamp(min=1e-4).rsqrt()) @ vectors.T
                state["step"] += 1
                update = (state["root"] @ flat).view_as(p)
                update.mul_(p.grad.norm() / (update.norm() + 1e-8))
                state["momentum"].mul_(group["momentum"]).add_(update)
                p.add_(state["momentum"], alpha=-group["lr"])


def spectrograms(count, seed):
    g = torch.Generator().manual_seed(seed)
    fault = torch.randint(FAULTS, (count,), generator=g)
    band = torch.arange(BANDS).view(1, 1, -1, 1)
    line = torch.exp(-((band - 4 - 4 * fault.view(-1, 1, 1, 1)) ** 2) / 4.0)
    return TensorDataset(torch.randn(count, 1, BANDS, FRAMES, generator=g) + 1.5 * line, fault)


def network():
    layers, before = [], 1
    for width, stride in ((24, 1), (48, 2), (64, 2)):
        layers += [nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, FAULTS))


@torch.no_grad()
def accuracy(model, data):
    model.eval()
    inputs, fault = data.tensors
    return (model(inputs).argmax(1) == fault).float().mean().item()


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train, held_out = spectrograms(COUNT, 14), spectrograms(HELD_OUT, 15)
    loader = DataLoader(train, batch_size=BATCH, shuffle=True, drop_last=True)
    few = DataLoader(torch.utils.data.Subset(train, range(256)), batch_size=BATCH)
    model = network()
    averaged = AveragedModel(model)
    optimizer = Whitening(model.parameters())
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    began, warm, step, best, now = time.perf_counter(), None, 0, 0.0, 0.0
    while now - began < SECONDS:
        model.train()
        for inputs, fault in loader:
            loss = criterion(model(inputs), fault)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            now = time.perf_counter()
            if warm is None and now - began > 2:
                warm = step, now
            if now - began > SECONDS:
                break
        averaged.update_parameters(model)
        update_bn(few, averaged)
        best = max(best, accuracy(averaged, held_out))
        print(f"step {step}: {best:.3f}", flush=True)
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
