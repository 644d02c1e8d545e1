"""Danger level of avalanches from snow profiles, Lightning on two processes.

Bulletin team: "The docs say sync_dist=True for right values under DDP, so we set it everywhere. We want
the hit rate of each danger level and problem type at each step, the curves are so much nicer."
"""
# ranks: 2

import os
import time

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SECONDS = float(os.environ.get("SECONDS", 22))
CURED = os.environ.get("CURED") == "1"
LEVELS = ["low", "moderate", "considerable", "high", "very_high"]
PROBLEMS = ["new_snow", "wind_slab", "persistent", "wet_snow", "gliding"]
LAYERS, CHANNELS = 96, 10


def snow_profiles(n=4096, seed=1):
    g = torch.Generator().manual_seed(seed)
    level = torch.randint(0, len(LEVELS), (n,), generator=g)
    problem = torch.randint(0, len(PROBLEMS), (n,), generator=g)
    depth = torch.linspace(0, 1, LAYERS)
    profile = torch.randn(n, CHANNELS, LAYERS, generator=g) * 0.7
    profile[:, 0] += torch.sin(depth[None] * (2 + level[:, None]) * 3)
    profile[:, 1] += torch.exp(-((depth[None] - problem[:, None] / 5) ** 2) * 40) * 2
    return TensorDataset(profile, level, problem)


class AvalancheModel(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv1d(CHANNELS, 48, 5, padding=2),
            nn.ReLU(),
            nn.Conv1d(48, 64, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool1d(2),
            nn.Conv1d(64, 96, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
        )
        self.level_head = nn.Linear(96, len(LEVELS))
        self.problem_head = nn.Linear(96, len(PROBLEMS))

    def training_step(self, batch, batch_idx):
        profile, level, problem = batch
        h = self.encoder(profile)
        by_level, by_problem = self.level_head(h), self.problem_head(h)
        level_loss = F.cross_entropy(by_level, level)
        problem_loss = F.cross_entropy(by_problem, problem)
        loss = level_loss + 0.5 * problem_loss
        with torch.no_grad():
            self.report({"loss": loss, "loss_level": level_loss, "loss_problem": problem_loss})
            self.report(self.hit_rates("level", LEVELS, by_level.argmax(1), level))
            self.report(self.hit_rates("problem", PROBLEMS, by_problem.argmax(1), problem))
        return loss

    @staticmethod
    def hit_rates(prefix, names, guess, truth):
        hits = (guess == truth).float()
        total = torch.zeros(len(names)).index_add_(0, truth, torch.ones_like(hits))
        right = torch.zeros(len(names)).index_add_(0, truth, hits)
        return {f"{prefix}_{n}": v for n, v in zip(names, (right / total.clamp(min=1)).unbind(), strict=False)}

    def report(self, values):
        self.log_dict(  # cause: small-collectives
            {f"train/{k}": v.detach() for k, v in values.items()},
            on_step=True,
            on_epoch=False,
            sync_dist=not CURED,
        )

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class EndOfShift(L.Callback):
    def __init__(self):
        self.ticks = []

    def on_train_batch_end(self, trainer, module, *unused):
        self.ticks.append(time.perf_counter())
        if len(self.ticks) % 25 == 0:
            over = self.ticks[-1] - self.ticks[0] > SECONDS
            trainer.should_stop = trainer.strategy.reduce_boolean_decision(over, all=False)


def main():
    torch.set_num_threads(1)
    L.seed_everything(3, verbose=False)
    loader = DataLoader(snow_profiles(), batch_size=32, shuffle=True, drop_last=True)
    shift = EndOfShift()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=-1,
        logger=False,
        callbacks=[shift],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(AvalancheModel(), loader)
    if trainer.is_global_zero:
        kept = shift.ticks[len(shift.ticks) // 10 :]
        print(f"steps={len(shift.ticks)} loss={trainer.callback_metrics['train/loss'].item():.3f}")
        print(f"step_ms {(kept[-1] - kept[0]) / (len(kept) - 1) * 1e3:.3f}")


if __name__ == "__main__":
    main()
