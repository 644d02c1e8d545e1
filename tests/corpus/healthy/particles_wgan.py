"""A WGAN with gradient penalty that imitates showers of particles; Lightning, optimised by hand.

"Two backward passes through the critic, and its penalty needs a graph of a graph: is that why it is slow?"
"""

import itertools
import os
import tempfile
import time

import lightning as L
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CELLS, NOISE, BATCH, CRITICS = 300, 64, 192, 3


def perceptron(*widths):
    layers = []
    for wide_in, wide_out in itertools.pairwise(widths):
        layers += [nn.Linear(wide_in, wide_out), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


class ShowerGAN(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = perceptron(NOISE, 512, 512, CELLS)
        self.critic = perceptron(CELLS, 512, 512, 1)

    def penalty(self, real, fake):
        """The gradient of the critic between the real and the invented should have the norm 1."""
        mix = torch.rand(len(real), 1)
        between = torch.lerp(real, fake, mix).requires_grad_(True)
        slope = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)[0]
        return (slope.norm(dim=1) - 1).square().mean()

    def training_step(self, batch, index):
        (real,) = batch
        opt_generator, opt_critic = self.optimizers()
        with torch.no_grad():
            fake = self.generator(torch.randn(len(real), NOISE))
        told_real, told_fake = self.critic(torch.cat([real, fake])).chunk(2)
        critic_loss = told_fake.mean() - told_real.mean() + 10 * self.penalty(real, fake)
        opt_critic.zero_grad()
        self.manual_backward(critic_loss)
        opt_critic.step()
        if (index + 1) % CRITICS == 0:
            self.critic.requires_grad_(False)
            loss = -self.critic(self.generator(torch.randn(len(real), NOISE))).mean()
            opt_generator.zero_grad()
            self.manual_backward(loss)
            opt_generator.step()
            self.critic.requires_grad_(True)
        self.log("distance", -critic_loss.detach())

    def configure_optimizers(self):
        settings = {"lr": 1e-4, "betas": (0.0, 0.9), "fused": True}
        return torch.optim.Adam(self.generator.parameters(), **settings), torch.optim.Adam(
            self.critic.parameters(), **settings
        )


class Clock(L.Callback):
    def on_train_start(self, trainer, module):
        self.steps, self.began, self.warm = 0, time.perf_counter(), None

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.steps += 1
        now = time.perf_counter()
        if self.warm is None and now - self.began > 2:
            self.warm = self.steps, now
        if now - self.began > SECONDS and not trainer.should_stop:
            print(f"step_ms {1000 * (now - self.warm[1]) / (self.steps - self.warm[0]):.3f}", flush=True)
            trainer.should_stop = True


def main():
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    depth = torch.arange(CELLS) / CELLS
    energy, peak = torch.rand(2, 96_000, 1)
    showers = TensorDataset(energy * torch.exp(-8 * (depth - peak).square()) + 0.02 * torch.rand(96_000, CELLS))
    loader = DataLoader(showers, batch_size=None, sampler=BatchSampler(RandomSampler(showers), BATCH, drop_last=True))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tempfile.mkdtemp(),
        callbacks=[Clock()],
    )
    trainer.fit(ShowerGAN(), loader)


if __name__ == "__main__":
    main()
