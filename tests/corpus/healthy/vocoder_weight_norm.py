"""Trains a vocoder against two discriminators with weight norms, as HiFi-GAN does, on generated tones.

Both are cleared before each pass of their own; the generator's pass also compares what the discriminators see inside.

"In the generator's step the discriminators get gradients, too. They are thrown away. Is that bad?"
"""

import os
import time
from itertools import chain, pairwise

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

SECONDS = float(os.environ.get("SECONDS", "22"))
FRAMES, HOP = 32, 16


class Vocoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.pre = weight_norm(nn.Conv1d(20, 64, 7, padding=3))
        self.up = nn.ModuleList(
            weight_norm(nn.ConvTranspose1d(64 >> i, 32 >> i, 8, stride=4, padding=2)) for i in range(2)
        )
        self.post = weight_norm(nn.Conv1d(16, 1, 7, padding=3))

    def forward(self, mel):
        x = self.pre(mel)
        for up in self.up:
            x = up(F.leaky_relu(x, 0.1))
        return torch.tanh(self.post(F.leaky_relu(x)))


class PeriodDiscriminator(nn.Module):
    def __init__(self, period):
        super().__init__()
        self.period = period
        widths = [1, 16, 32, 64]
        self.convs = nn.ModuleList(
            weight_norm(nn.Conv2d(a, b, (5, 1), (3, 1), padding=(2, 0))) for a, b in pairwise(widths)
        )
        self.post = weight_norm(nn.Conv2d(64, 1, (3, 1), padding=(1, 0)))

    def forward(self, wave):
        x = wave.view(wave.shape[0], 1, -1, self.period)
        features = []
        for conv in self.convs:
            x = F.leaky_relu(conv(x), 0.1)
            features.append(x)
        return self.post(x).flatten(1), features


def tones(batch):
    pitch = 0.02 + 0.2 * torch.rand(batch, 1, 1)
    wave = torch.sin(pitch * torch.arange(FRAMES * HOP)[None, None])
    mel = wave.view(batch, 1, FRAMES, HOP).mean(1).transpose(1, 2)
    return torch.cat([mel, mel[:, :4]], 1), wave


def main():
    torch.set_num_threads(1)
    torch.manual_seed(2)
    vocoder, judges = Vocoder(), nn.ModuleList([PeriodDiscriminator(2), PeriodDiscriminator(4)])
    optim_g = torch.optim.AdamW(vocoder.parameters(), 2e-4, betas=(0.8, 0.99))
    optim_d = torch.optim.AdamW(chain(*(judge.parameters() for judge in judges)), 2e-4, betas=(0.8, 0.99))
    began, warm, step = time.perf_counter(), None, 0
    while True:
        mel, wave = tones(12)
        made = vocoder(mel)

        optim_d.zero_grad()
        loss_d = torch.zeros(())
        for judge in judges:
            loss_d = loss_d + (1 - judge(wave)[0]).square().mean() + judge(made.detach())[0].square().mean()
        loss_d.backward()
        optim_d.step()

        optim_g.zero_grad()
        loss_g = 45 * F.l1_loss(made, wave)
        for judge in judges:
            (score, of_made), (_, of_wave) = judge(made), judge(wave)
            loss_g = loss_g + (1 - score).square().mean()
            loss_g = loss_g + 2 * sum(F.l1_loss(a, b.detach()) for a, b in zip(of_made, of_wave, strict=True))
        loss_g.backward()
        optim_g.step()

        step += 1
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
