"""Tells birds apart by filters as long as the recording, which are applied by way of the Fourier transform.

The product's slopes are written by hand: torch's own for a real transform goes through a complex one of full length.

"The filters are transformed anew at every step, and each signal is padded with as many zeros as it has samples."
"""

import os
import time

import torch
import torch.nn.functional as F
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
LENGTH, WIDTH, BATCH, BIRDS = 1024, 32, 12, 8


class LongFilter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, taps):
        waves, shape = torch.fft.rfft(x, 2 * LENGTH), torch.fft.rfft(taps, 2 * LENGTH)
        ctx.save_for_backward(waves, shape)
        return torch.fft.irfft(waves * shape, 2 * LENGTH)[..., :LENGTH]

    @staticmethod
    def backward(ctx, slope):
        waves, shape = ctx.saved_tensors
        slope = torch.fft.rfft(slope, 2 * LENGTH)
        to_x = torch.fft.irfft(slope * shape.conj(), 2 * LENGTH)[..., :LENGTH]
        both = slope.conj_physical_().mul_(waves).sum(1, keepdim=True).conj()
        return to_x, torch.fft.irfft(both, 2 * LENGTH)[..., :LENGTH]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.taps = nn.Parameter(0.05 * torch.randn(WIDTH, 1, LENGTH))
        self.wide = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) / WIDTH**0.5)
        self.back = nn.Parameter(0.3 * torch.randn(WIDTH, 3 * WIDTH) / WIDTH**0.5)
        self.shift = nn.Parameter(torch.zeros(3 * WIDTH, 1))
        fade = torch.exp(-torch.arange(LENGTH) * torch.logspace(-3, -1, WIDTH).view(-1, 1, 1))
        self.register_buffer("fade", fade)

    def forward(self, x):
        """x: (channels, recordings * samples), so that what mixes channels is one matrix product."""
        norm = self.norm(x.unsqueeze(0)).view(WIDTH, -1, LENGTH)
        h = LongFilter.apply(norm, self.taps * self.fade).reshape(WIDTH, -1)
        return torch.addmm(x, self.back, F.gelu(torch.addmm(self.shift, self.wide, h)))


class Ear(nn.Module):
    def __init__(self):
        super().__init__()
        self.into = nn.Parameter(torch.randn(WIDTH, 9) / 3)
        self.blocks = nn.Sequential(Block(), Block())
        self.out = nn.Linear(WIDTH, BIRDS)

    def forward(self, x):
        """x: (recordings, samples)."""
        near = F.pad(x, (4, 4)).unfold(1, 9, 1).permute(2, 0, 1).reshape(9, -1)
        return self.out(self.blocks(self.into @ near).view(WIDTH, len(x), LENGTH).mean(2).T)


def songs(count):
    when, bird = torch.linspace(0, 1, LENGTH), torch.randint(BIRDS, (count,))
    tone = (60 + 25 * bird).unsqueeze(1) + 5 * torch.randn(count, 1)
    trill = torch.sin((6.28 * (2 + bird % 3)).unsqueeze(1) * (when + torch.rand(count, 1)))
    return torch.sin(tone * when + 3 * trill) + 0.5 * torch.randn(count, LENGTH), bird


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sounds, birds = songs(4000)
    held, held_birds = songs(96)
    model = Ear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    began, mark, step = time.perf_counter(), None, 0
    while True:
        some = torch.randint(len(sounds), (BATCH,))
        loss = F.cross_entropy(model(sounds[some]), birds[some])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 300 == 0:
            model.eval()
            with torch.inference_mode():
                right = (model(held).argmax(1) == held_birds).float().mean()
            model.train()
            print(f"{step}: loss {loss.item():.3f}, right {right.item():.2f}", flush=True)
        now = time.perf_counter()
        if mark is None and now - began > 2:
            mark = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - mark[1]) / (step - mark[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
