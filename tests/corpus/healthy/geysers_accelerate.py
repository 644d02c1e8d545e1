"""Forecasts when geysers erupt with Accelerate; a batch whose loss is far above the usual one is not learned from.

"I need the loss as a number before backward, each time, and I print a line whenever a batch is left out. I have been
told that item() kills the speed. Does it?"
"""

import os
import time

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SECONDS = float(os.environ.get("SECONDS", "22"))


def eruptions(count, seed):
    g = torch.Generator().manual_seed(seed)
    past = torch.rand(count, 4, 160, generator=g).cumsum(2) / 12
    wait = past[:, :, ::16].mean((1, 2)).sin()[:, None] + 0.05 * torch.randn(count, 1, generator=g)
    wait[torch.rand(count, generator=g) < 0.0002] *= 60
    return TensorDataset(past, wait)


class Waits(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(4, width, 7, padding=3), nn.SiLU(), nn.Conv1d(width, width, 7, stride=2, padding=3), nn.SiLU(),
            nn.Conv1d(width, width, 5, stride=2, padding=2), nn.SiLU(), nn.AdaptiveAvgPool1d(5), nn.Flatten(),
        )  # fmt: skip
        self.wait = nn.Linear(5 * width, 1)

    def forward(self, past):
        return self.wait(self.body(past))


@torch.no_grad()
def held_error(accelerator, model, loader):
    model.eval()
    pairs = [accelerator.gather_for_metrics((model(past), wait)) for past, wait in loader]
    model.train()
    told, wait = (torch.cat(part) for part in zip(*pairs, strict=True))
    return (told - wait).abs().median().item()


def main():
    accelerator = Accelerator(cpu=True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Waits()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train = DataLoader(eruptions(6_000, 1), batch_size=64, shuffle=True, drop_last=True)
    held = DataLoader(eruptions(256, 2), batch_size=128)
    model, optimizer, train, held = accelerator.prepare(model, optimizer, train, held)
    usual, left_out = None, 0
    began, warm, step, now = time.perf_counter(), None, 0, 0.0
    while now < SECONDS:
        for past, wait in train:
            loss = nn.functional.mse_loss(model(past), wait)
            value = loss.item()
            usual = value if usual is None else usual
            if value > 8 * usual:
                left_out += 1
                accelerator.print(f"step {step}: left out, {value:.3f} is far from {usual:.3f}")
                usual *= 1.1
            else:
                usual = 0.98 * usual + 0.02 * value
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            now = time.perf_counter() - began
            if warm is None and now > 2:
                warm = now, step
            if step % 500 == 0:
                accelerator.print(f"step {step}: error {held_error(accelerator, model, held):.4f}, {left_out} left out")
            if now >= SECONDS:
                break
    accelerator.print(f"step_ms {1000 * (now - warm[0]) / (step - warm[1]):.3f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
