"""Train a small WGAN on synthetic 2-D spirals lifted to 64 dimensions, with a Lipschitz penalty on the critic.

Generator and critic are MLPs. Instead of a gradient penalty we add the squared
excess of each critic layer's spectral norm over one.

"The networks are tiny MLPs, a forward pass is a millisecond, but my steps take
many times that. Making the batch smaller does nothing at all."
"""

import math
import os
import time

import torch
import torch.nn.functional as F
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
torch.set_num_threads(1)
torch.manual_seed(3)

Z, D, H, BS = 16, 64, 320, 256
LIFT = torch.randn(2, D) / math.sqrt(2)


def real_batch(n):
    t = torch.rand(n) * 3 * math.pi + 0.5
    xy = torch.stack([t.cos() * t, t.sin() * t], 1) / 6
    return (xy + 0.02 * torch.randn_like(xy)) @ LIFT


def mlp(i, o):
    return nn.Sequential(
        nn.Linear(i, H),
        nn.LeakyReLU(0.2),
        nn.Linear(H, H),
        nn.LeakyReLU(0.2),
        nn.Linear(H, H),
        nn.LeakyReLU(0.2),
        nn.Linear(H, o),
    )


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(D, 1)
        self.linears = [m for m in self.net if isinstance(m, nn.Linear)]
        self.us = [F.normalize(torch.randn(m.out_features), dim=0) for m in self.linears]

    def forward(self, x):
        return self.net(x).squeeze(1)

    def lipschitz_penalty(self):
        pen = 0.0
        for k, layer in enumerate(self.linears):
            w = layer.weight
            if CURED:  # one power iteration, the vector is kept between the steps
                with torch.no_grad():
                    v = F.normalize(w.t() @ self.us[k], dim=0)
                    self.us[k] = F.normalize(w @ v, dim=0)
                sigma = self.us[k] @ (w @ v)
            else:
                sigma = torch.linalg.matrix_norm(w, ord=2)  # cause: hot-line
            pen = pen + F.relu(sigma - 1.0) ** 2
        return pen


def train():
    gen, critic = mlp(Z, D), Critic()
    opt_g = torch.optim.Adam(gen.parameters(), lr=1e-4, betas=(0.5, 0.9))
    opt_c = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.9))
    hist = {"w": [], "pen": []}
    step, mark = 0, None
    t0 = time.perf_counter()
    while True:
        now = time.perf_counter()
        if mark is None and now - t0 >= 2:
            mark = (now, step)
        if now - t0 >= SECONDS:
            break
        # critic
        with torch.no_grad():
            fake = gen(torch.randn(BS, Z))
        wdist = critic(real_batch(BS)).mean() - critic(fake).mean()
        pen = critic.lipschitz_penalty()
        loss_c = -wdist + 10.0 * pen
        opt_c.zero_grad()
        loss_c.backward()
        opt_c.step()
        # generator, each second step
        if step % 2 == 0:
            loss_g = -critic(gen(torch.randn(BS, Z))).mean()
            opt_g.zero_grad()
            loss_g.backward()
            opt_g.step()
        step += 1
        if step % 50 == 0:
            hist["w"].append(wdist.item())
            hist["pen"].append(pen.item())
            print(f"[{step:5d}] W~{hist['w'][-1]:.3f} pen {hist['pen'][-1]:.3f}")
    end = time.perf_counter()
    print(f"step_ms {(end - mark[0]) * 1e3 / max(1, step - mark[1]):.3f}", flush=True)


if __name__ == "__main__":
    train()
