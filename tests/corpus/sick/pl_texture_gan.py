"""A small GAN for grey textures in Lightning, with manual optimization.

Structure taken from pix2pix: the discriminator is frozen while the generator learns.

"Updating the discriminator costs more than updating the generator, though the discriminator is
the far smaller of the two networks and gets only two batches of 32 x 32."
"""

import logging
import os
import tempfile
import time
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
torch.set_num_threads(1)
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Textures(Dataset):
    def __init__(self, n=4000):
        gen = torch.Generator().manual_seed(2)
        noise = torch.randn(n, 1, 16, 16, generator=gen)
        self.pictures = torch.tanh(F.interpolate(noise, scale_factor=2, mode="bilinear") * 1.5)

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, i):
        return self.pictures[i]


def up(c_in, c_out):
    return nn.Sequential(
        nn.Upsample(scale_factor=2), nn.Conv2d(c_in, c_out, 3, padding=1), nn.BatchNorm2d(c_out), nn.ReLU()
    )


class Generator(nn.Module):
    def __init__(self, latent=64):
        super().__init__()
        self.fc = nn.Linear(latent, 64 * 16)
        self.net = nn.Sequential(up(64, 48), up(48, 32), up(32, 24), nn.Conv2d(24, 1, 3, padding=1), nn.Tanh())

    def forward(self, z):
        return self.net(self.fc(z).view(-1, 64, 4, 4))


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(16, 32, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(32 * 64, 1),
        )

    def forward(self, x):
        return self.net(x)


class TextureGAN(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.gen, self.disc = Generator(), Discriminator()

    def configure_optimizers(self):
        return [torch.optim.Adam(net.parameters(), lr=2e-4, betas=(0.5, 0.999)) for net in (self.gen, self.disc)]

    def training_step(self, real, batch_idx):
        opt_g, opt_d = self.optimizers()

        self.disc.requires_grad_(True)
        fake = self.gen(torch.randn(len(real), 64))
        if CURED:
            fake = fake.detach()
        loss_d = F.softplus(-self.disc(real)).mean() + F.softplus(self.disc(fake)).mean()
        opt_d.zero_grad()
        self.manual_backward(loss_d)  # cause: gradients-cleared
        opt_d.step()

        self.disc.requires_grad_(False)
        loss_g = F.softplus(-self.disc(self.gen(torch.randn(len(real), 64)))).mean()
        opt_g.zero_grad()
        self.manual_backward(loss_g)
        opt_g.step()
        self.log_dict({"loss_d": loss_d.detach(), "loss_g": loss_g.detach()})


class Deadline(L.Callback):
    first, count, begun = None, 0, None

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        now = time.perf_counter()
        self.begun = self.begun or now
        if self.first is None and now >= self.begun + 2:
            self.first = (now, self.count)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.count += 1
        now = time.perf_counter()
        if now - self.begun > SECONDS and not trainer.should_stop:
            trainer.should_stop = True
            self.step_ms = (now - self.first[0]) / (self.count - self.first[1]) * 1000


def main():
    L.seed_everything(0, verbose=False)
    deadline = Deadline()
    with tempfile.TemporaryDirectory() as tmp:
        quiet = {
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        trainer = L.Trainer(accelerator="cpu", max_epochs=-1, default_root_dir=tmp, callbacks=[deadline], **quiet)
        trainer.fit(TextureGAN(), DataLoader(Textures(), batch_size=12, shuffle=True, drop_last=True))
    print(f"step_ms {deadline.step_ms:.3f}", flush=True)


if __name__ == "__main__":
    main()
