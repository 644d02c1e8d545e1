"""Trains a generator of pictures of ancient coins against a critic.

Both are convolutional, as in the DCGAN paper but smaller; one step is one update of each.

"I had to add retain_graph=True to get rid of an error, and the training works. But it is slower
than the repositories that I compare it to."
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
torch.set_num_threads(1)
NOISE, BATCH, COINS = 64, 16, 2000


def make_coins():
    g = torch.Generator().manual_seed(9)
    line = torch.linspace(-1, 1, 28)
    y, x = torch.meshgrid(line, line, indexing="ij")
    radius = 0.6 + 0.3 * torch.rand(COINS, 1, 1, generator=g)
    angle = 6.28 * torch.rand(COINS, 1, 1, generator=g)
    disc = torch.sigmoid(30 * (radius - (x**2 + y**2).sqrt()))
    relief = torch.sin(5 * (x * angle.cos() + y * angle.sin()))
    return (disc * (0.6 + 0.4 * relief))[:, None] * 2 - 1


def up(inputs, outputs):
    return nn.Sequential(
        nn.Upsample(scale_factor=2), nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU()
    )


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Linear(NOISE, 64 * 7 * 7)
        self.body = nn.Sequential(
            up(64, 48),
            up(48, 32),
            nn.Conv2d(32, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 1, 3, padding=1),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.body(self.start(z).view(-1, 64, 7, 7))


def make_critic():
    return nn.Sequential(
        nn.Conv2d(1, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 32, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 1),
    )  # fmt: skip


def bce(scores, target):
    return nn.functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, target))


def main():
    torch.manual_seed(0)
    coins = make_coins()
    gen, critic = Generator(), make_critic()
    opt_g = torch.optim.Adam(gen.parameters(), lr=2e-4, betas=(0.5, 0.999), fused=True)
    opt_c = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999), fused=True)
    step, mark = 0, None
    began = time.perf_counter()
    while True:
        now = time.perf_counter() - began
        if mark is None and now >= 2:
            mark = now, step
        if now >= SECONDS:
            break
        real = coins[torch.randint(COINS, (BATCH,))]
        fake = gen(torch.randn(BATCH, NOISE))

        # the critic
        shown = fake.detach() if CURED else fake
        loss_c = bce(critic(real), 0.9) + bce(critic(shown), 0.0)
        opt_c.zero_grad()
        loss_c.backward(retain_graph=not CURED)  # cause: gradients-cleared
        opt_c.step()

        # the generator
        critic.requires_grad_(False)
        loss_g = bce(critic(fake), 1.0)
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()
        critic.requires_grad_(True)
        step += 1
        if step % 100 == 0:
            print(f"step {step} critic {loss_c.item():.3f} generator {loss_g.item():.3f}")
    print(f"step_ms {(now - mark[0]) / max(1, step - mark[1]) * 1e3:.3f}", flush=True)


if __name__ == "__main__":
    main()
