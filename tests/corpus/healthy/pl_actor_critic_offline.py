"""Offline actor-critic on generated control data with Lightning, three optimizers and manual optimization.

The start is slow because the data set is simulated first; afterwards the rows lie in memory.

"Each step runs several forward and backward passes, and it prints while it trains."
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
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

SECONDS = float(os.environ.get("SECONDS", "22"))
torch.set_num_threads(1)
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

OBS, ACT = 12, 3


def simulate(robots=400, steps=150):
    gen = torch.Generator().manual_seed(1)
    a = torch.eye(OBS) * 0.97 + 0.02 * torch.randn(OBS, OBS, generator=gen)
    b = 0.1 * torch.randn(ACT, OBS, generator=gen)
    obs, rows = torch.randn(robots, OBS, generator=gen), []
    for _ in range(steps):
        act = torch.tanh(torch.randn(robots, ACT, generator=gen))
        new = (obs @ a + act @ b + 0.01 * torch.randn(robots, OBS, generator=gen)).clamp(-5, 5)
        rows.append((obs, act, -new.square().mean(1), new))
        obs = new
    return TensorDataset(*(torch.cat(column) for column in zip(*rows, strict=True)))


def mlp(n_in, n_out, width=192):
    return nn.Sequential(nn.Linear(n_in, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, n_out))


class ImplicitQ(L.LightningModule):
    """Expectile regression for V, TD for Q, weighted regression for the policy."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.q, self.v, self.pi = mlp(OBS + ACT, 1), mlp(OBS, 1), mlp(OBS, ACT)
        self.q_slow = mlp(OBS + ACT, 1).requires_grad_(False)
        self.q_slow.load_state_dict(self.q.state_dict())

    def configure_optimizers(self):
        return [torch.optim.Adam(net.parameters(), lr=3e-4) for net in (self.v, self.q, self.pi)]

    def descend(self, optimizer, loss):
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def training_step(self, batch, batch_idx):
        obs, act, reward, new = batch
        opt_v, opt_q, opt_pi = self.optimizers()
        both = torch.cat([obs, act], 1)
        with torch.no_grad():
            target = self.q_slow(both)
        gap = target - self.v(obs)
        loss_v = (torch.where(gap > 0, 0.8, 0.2) * gap.square()).mean()
        self.descend(opt_v, loss_v)

        with torch.no_grad():
            goal = reward[:, None] + 0.99 * self.v(new)
        loss_q = F.mse_loss(self.q(both), goal)
        self.descend(opt_q, loss_q)

        weight = (3 * gap.detach()).exp().clamp(max=100)
        loss_pi = (weight * (torch.tanh(self.pi(obs)) - act).square()).mean()
        self.descend(opt_pi, loss_pi)

        if batch_idx % 2 == 0:
            torch._foreach_lerp_(list(self.q_slow.parameters()), [p.detach() for p in self.q.parameters()], 0.01)
        if batch_idx % 100 == 0:
            print(f"{batch_idx:5d} v {loss_v.item():.4f} q {loss_q.item():.4f} pi {loss_pi.item():.4f}")

    def validation_step(self, batch, batch_idx):
        obs, act, *_ = batch
        self.log("advantage", (self.q(torch.cat([obs, act], 1)) - self.v(obs)).mean())


class Meter(L.Callback):
    def on_train_start(self, trainer, module):
        self.t0, self.steps, self.mark = time.perf_counter(), 0, None

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.steps += 1
        t = time.perf_counter() - self.t0
        if self.mark is None and t > 2:
            self.mark = t, self.steps
        if t > SECONDS and not trainer.should_stop:
            self.step_ms = 1000 * (t - self.mark[0]) / (self.steps - self.mark[1])
            trainer.should_stop = True


if __name__ == "__main__":
    L.seed_everything(0, verbose=False)
    data = simulate()
    train, held = torch.utils.data.random_split(data, [len(data) - 2048, 2048])

    def loader(part, batch_size=256):
        order = BatchSampler(RandomSampler(part), batch_size, drop_last=True)
        return DataLoader(TensorDataset(*data[part.indices]), sampler=order, batch_size=None)

    meter = Meter()
    with tempfile.TemporaryDirectory() as tmp:
        trainer = L.Trainer(
            accelerator="cpu",
            max_epochs=-1,
            default_root_dir=tmp,
            callbacks=[meter],
            check_val_every_n_epoch=2,
            num_sanity_val_steps=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(ImplicitQ(), loader(train), loader(held))
    print(f"step_ms {meter.step_ms:.3f}", flush=True)
