"""GAN on generated textures with a lazy gradient penalty and averaged generator weights.

The R1 penalty needs second derivatives; it is applied in every 16th step. Images are 32x32.

"One step in sixteen takes twice as long, and there are tiny batches and two optimizers. Can I trust the timing?"
"""

import copy
import os
import time

import torch
import torch.nn.functional as F
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
Z, W, BATCH = 32, 16, 8


def generator():
    return nn.Sequential(
        nn.Linear(Z, 4 * W * 16),
        nn.Unflatten(1, (4 * W, 4, 4)),
        nn.ReLU(),
        nn.ConvTranspose2d(4 * W, 2 * W, 4, 2, 1),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * W, W, 4, 2, 1),
        nn.ReLU(),
        nn.ConvTranspose2d(W, 1, 4, 2, 1),
        nn.Tanh(),
    )


def critic():
    return nn.Sequential(
        nn.Conv2d(1, W, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(W, 2 * W, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(2 * W, 4 * W, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(4 * W * 16, 1),
    )


def textures(n=2048):
    g = torch.Generator().manual_seed(0)
    y, x = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    f = 0.2 + torch.rand(n, 2, 1, 1, generator=g)
    phase = 6.28 * torch.rand(n, 1, 1, generator=g)
    return torch.sin(f[:, 0] * x + f[:, 1] * y + phase)[:, None]


class Game:
    def __init__(self):
        self.g, self.d = generator(), critic()
        self.shadow = copy.deepcopy(self.g).requires_grad_(False)
        self.pairs = list(self.shadow.parameters()), list(self.g.parameters())
        self.opt_g = torch.optim.Adam(self.g.parameters(), lr=2e-4, betas=(0.0, 0.99), fused=True)
        self.opt_d = torch.optim.Adam(self.d.parameters(), lr=2e-4, betas=(0.0, 0.99), fused=True)
        self.it = 0

    def critic_step(self, real):
        with torch.no_grad():
            fake = self.g(torch.randn(BATCH, Z))
        loss = F.softplus(self.d(fake)).mean() + F.softplus(-self.d(real)).mean()
        if self.it % 16 == 0:
            real = real.clone().requires_grad_()
            (grad,) = torch.autograd.grad(self.d(real).sum(), real, create_graph=True)
            loss = loss + 8 * grad.square().sum((1, 2, 3)).mean()
        self.opt_d.zero_grad()
        loss.backward()
        self.opt_d.step()
        return loss

    def generator_step(self):
        self.d.requires_grad_(False)
        loss = F.softplus(-self.d(self.g(torch.randn(BATCH, Z)))).mean()
        self.opt_g.zero_grad()
        loss.backward()
        self.opt_g.step()
        self.d.requires_grad_(True)
        with torch.no_grad():
            torch._foreach_lerp_(*self.pairs, 0.002)
        return loss

    def step(self, real):
        losses = self.critic_step(real), self.generator_step()
        self.it += 1
        return losses


def main():
    torch.set_num_threads(1)
    torch.manual_seed(1)
    data, game = textures(), Game()
    begin, mark = time.perf_counter(), None
    while True:
        d, g = game.step(data[torch.randint(len(data), (BATCH,))])
        if game.it % 200 == 0:
            print(f"{game.it}: critic {d.item():.3f} generator {g.item():.3f}")
        now = time.perf_counter() - begin
        if mark is None and now > 2:
            mark = now, game.it
        if now > SECONDS:
            break
    print(f"step_ms {1e3 * (now - mark[0]) / (game.it - mark[1]):.3f}", flush=True)


if __name__ == "__main__":
    main()
