"""Learns to draw ripples of water by diffusion with Lightning, keeps an average of the weights and draws some at times.

"Lightning warns me that my loader has no workers, and my callback goes over all weights after every step."
"""

import os
import tempfile
import time
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

SECONDS = float(os.environ.get("SECONDS", "22"))
LENGTH, WIDTH, BATCH, TIMES = 128, 48, 32, 400
warnings.filterwarnings("ignore", category=UserWarning)


class Ripples(Dataset):
    """Held in memory; asked for a whole batch at once."""

    def __init__(self, count, seed):
        gen = torch.Generator().manual_seed(seed)
        at = torch.linspace(0, 1, LENGTH)
        centre, tone = torch.rand(count, 1, 1, generator=gen), 10 + 30 * torch.rand(count, 1, 1, generator=gen)
        away = (at - centre).abs()
        self.waves = torch.cos(tone * away) * torch.exp(-3 * away)

    def __len__(self):
        return len(self.waves)

    def __getitem__(self, numbers):
        return self.waves[numbers]


class Block(nn.Module):
    def __init__(self, into, out):
        super().__init__()
        self.first, self.second = nn.Conv1d(into, out, 5, padding=2), nn.Conv1d(out, out, 5, padding=2)
        self.norm, self.time = nn.GroupNorm(8, out), nn.Linear(64, out)
        self.skip = nn.Conv1d(into, out, 1) if into != out else nn.Identity()

    def forward(self, x, when):
        h = F.silu(self.norm(self.first(x)) + self.time(when).unsqueeze(2))
        return F.silu(self.second(h) + self.skip(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("tones", torch.exp(torch.linspace(0, 6, 32)))
        self.when = nn.Sequential(nn.Linear(64, 64), nn.SiLU())
        self.down, self.low, self.up = Block(1, WIDTH), Block(WIDTH, 2 * WIDTH), Block(3 * WIDTH, WIDTH)
        self.out = nn.Conv1d(WIDTH, 1, 1)

    def forward(self, x, t):
        angle = (t / TIMES).unsqueeze(1) * self.tones
        when = self.when(torch.cat((angle.sin(), angle.cos()), 1))
        high = self.down(x, when)
        low = self.low(F.avg_pool1d(high, 4), when)
        return self.out(self.up(torch.cat((high, F.interpolate(low, scale_factor=4.0)), 1), when))


class Diffusion(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()
        self.average = Net().requires_grad_(False)
        self.average.load_state_dict(self.net.state_dict())
        self.register_buffer("kept", torch.cos(torch.linspace(0.01, 1.55, TIMES)).square())

    def noised(self, wave):
        t = torch.randint(TIMES, (len(wave),))
        kept, noise = self.kept[t].view(-1, 1, 1), torch.randn_like(wave)
        return kept.sqrt() * wave + (1 - kept).sqrt() * noise, t, noise

    def training_step(self, wave, number):
        x, t, noise = self.noised(wave)
        loss = F.mse_loss(self.net(x, t), noise)
        self.log("loss", loss)
        return loss

    def validation_step(self, wave, number):
        x, t, noise = self.noised(wave)
        self.log("val", F.mse_loss(self.average(x, t), noise))

    def on_validation_epoch_end(self):
        x = torch.randn(8, 1, LENGTH)
        times = list(range(TIMES - 1, 0, -20))
        for now, then in zip(times, [*times[1:], 0], strict=True):
            noise = self.average(x, torch.full((8,), now))
            clean = (x - (1 - self.kept[now]).sqrt() * noise) / self.kept[now].sqrt()
            x = self.kept[then].sqrt() * clean + (1 - self.kept[then]).sqrt() * noise
        print(f"drawn between {x.min().item():.2f} and {x.max().item():.2f}", flush=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net.parameters(), lr=1e-3, fused=True)


class Average(L.Callback):
    def setup(self, trainer, module, stage):
        self.now, self.kept = list(module.net.parameters()), list(module.average.parameters())

    @torch.no_grad()
    def on_train_batch_end(self, trainer, module, outputs, batch, number):
        torch._foreach_lerp_(self.kept, self.now, 0.002)


class Clock(L.Callback):
    began = mark = None

    def on_train_batch_end(self, trainer, module, outputs, batch, number):
        now, step = time.perf_counter(), trainer.global_step
        self.began = self.began or now
        if self.mark is None and now - self.began > 2:
            self.mark = step, now
        if now - self.began > SECONDS and not trainer.should_stop:
            trainer.should_stop = True
            print(f"step_ms {1000 * (now - self.mark[1]) / (step - self.mark[0]):.3f}", flush=True)


def loader(data):
    return DataLoader(data, sampler=BatchSampler(RandomSampler(data), BATCH, drop_last=True), batch_size=None)


def main():
    torch.set_num_threads(1)
    L.seed_everything(0)
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_steps=-1, max_epochs=-1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=50, callbacks=[Average(), Clock()],
        val_check_interval=400, check_val_every_n_epoch=None, limit_val_batches=4, num_sanity_val_steps=0,
        default_root_dir=tempfile.mkdtemp(),
    )  # fmt: skip
    trainer.fit(Diffusion(), loader(Ripples(12_800, 0)), loader(Ripples(128, 1)))


if __name__ == "__main__":
    main()
