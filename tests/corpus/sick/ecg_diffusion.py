"""Unconditional diffusion model for generated ECG beats, with averaged weights for sampling.

DDPM noise prediction with a residual MLP-mixer over the beat; cosine noise schedule.

"Loss and samples are fine. But iterations per second fell visibly between my first script and this
'grown-up' version of it, and the forward and backward pass are the same in both."
"""

import copy
import math
import os
import time

import torch
import torch.nn.functional as F
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"

BEAT, DIM, BLOCKS, BATCH, T = 96, 128, 14, 32, 400


def beats(n, gen):
    t = torch.linspace(0, 1, BEAT)
    shift = 0.05 * torch.randn(n, 1, generator=gen)
    width = 0.02 + 0.01 * torch.rand(n, 1, generator=gen)
    qrs = torch.exp(-((t - 0.4 - shift) ** 2) / (2 * width**2))
    wave = 0.3 * torch.exp(-((t - 0.7 - shift) ** 2) / (2 * (3 * width) ** 2))
    return qrs + wave


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.time = nn.Linear(DIM, DIM)
        self.up = nn.Linear(DIM, DIM)
        self.down = nn.Linear(DIM, DIM)

    def forward(self, x, emb):
        h = F.silu(self.up(self.norm(x)) + self.time(emb))
        return x + self.down(h)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("freq", torch.exp(-math.log(1e4) * torch.arange(DIM // 2) / (DIM // 2)))
        self.inp = nn.Linear(BEAT, DIM)
        self.blocks = nn.ModuleList(Residual() for _ in range(BLOCKS))
        self.out = nn.Linear(DIM, BEAT)

    def forward(self, x, t):
        ang = t[:, None] * self.freq
        emb = torch.cat([ang.sin(), ang.cos()], dim=-1)
        h = self.inp(x)
        for b in self.blocks:
            h = b(h, emb)
        return self.out(h)


class Averaged:
    def __init__(self, model, decay=0.999):
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        self.decay = decay
        self.mine, self.theirs = list(self.model.parameters()), list(model.parameters())

    @torch.no_grad()
    def update(self, model):
        if CURED:
            torch._foreach_lerp_(self.mine, self.theirs, 1 - self.decay)
            return
        new, old = model.state_dict(), self.model.state_dict()  # cause: hot-line
        mixed = {k: self.decay * v + (1 - self.decay) * new[k] for k, v in old.items()}
        self.model.load_state_dict(mixed)  # cause: hot-line


def schedule():
    s = torch.arange(T + 1) / T
    f = torch.cos((s + 0.008) / 1.008 * math.pi / 2) ** 2
    return (f / f[0])[1:].clamp(1e-4, 1)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    gen = torch.Generator().manual_seed(4)
    data, alpha = beats(8000, gen), schedule()
    model = Denoiser()
    ema = Averaged(model)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    step, after, clock = 0, None, time.perf_counter()
    while (spent := time.perf_counter() - clock) < SECONDS:
        if after is None and spent > 2:
            after = step, spent
        x = data[torch.randint(len(data), (BATCH,), generator=gen)]
        t = torch.randint(T, (BATCH,), generator=gen)
        noise = torch.randn(x.shape, generator=gen)
        a = alpha[t, None]
        loss = F.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)
        opt.zero_grad()
        loss.backward()
        opt.step()
        ema.update(model)  # cause: hot-line
        step += 1
        if step % 500 == 0:
            print(f"[{step}] mse={loss.item():.4f}")
    print(f"step_ms {(spent - after[1]) / (step - after[0]) * 1e3:.3f}", flush=True)


if __name__ == "__main__":
    main()
