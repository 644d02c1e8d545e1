"""Tunes eight prompt vectors in front of a frozen transformer on saddlers' orders, with Lightning.

The vectors stand at the entrance, so their gradient has to come back through all of the frozen body.

"Only 768 numbers are trained, everything else is frozen, but the backward pass takes longer than the forward pass.
Surely most of that is wasted?"
"""

import os
import time
import warnings

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SECONDS = float(os.environ.get("SECONDS", "22"))
WORDS, WIDTH, LENGTH, PROMPTS, KINDS = 1000, 96, 32, 8, 6
warnings.filterwarnings("ignore")


def pretrained():
    """Stands for the download: the weights are drawn."""
    torch.manual_seed(29)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
    body = nn.ModuleDict(
        {
            "words": nn.Embedding(WORDS, WIDTH),
            "layers": nn.TransformerEncoder(layer, 3, enable_nested_tensor=False),
            "kinds": nn.Linear(WIDTH, KINDS),
        }
    )
    return body.requires_grad_(False)


class Prompted(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = pretrained()
        self.prompts = nn.Parameter(0.5 * torch.randn(PROMPTS, WIDTH))

    def forward(self, words):
        words = self.body["words"](words)
        x = torch.cat([self.prompts.expand(len(words), -1, -1), words], 1)
        return self.body["kinds"](self.body["layers"](x)[:, 0])

    def training_step(self, batch, _):
        words, kind = batch
        loss = nn.functional.cross_entropy(self(words), kind)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam([self.prompts], lr=0.02)


class Clock(Callback):
    def __init__(self):
        self.began, self.mark, self.last = time.perf_counter(), None, None

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        now = time.perf_counter()
        self.last = trainer.global_step, now
        if self.mark is None and now - self.began > 2:
            self.mark = self.last
        if now - self.began > SECONDS:
            trainer.should_stop = True


def orders(n=3200):
    g = torch.Generator().manual_seed(7)
    kind = torch.randint(KINDS, (n,), generator=g)
    words = torch.randint(WORDS, (n, LENGTH), generator=g)
    tell = torch.rand(n, LENGTH, generator=g) < 0.2
    words[tell] = kind[:, None].expand_as(tell)[tell]
    return TensorDataset(words, kind)


def main():
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    clock = Clock()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        logger=False,
        callbacks=[clock],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Prompted(), DataLoader(orders(), batch_size=16, shuffle=True))
    print(f"loss {trainer.callback_metrics['loss'].item():.3f}", flush=True)
    (n, then), (m, now) = clock.mark, clock.last
    print(f"step_ms {1000 * (now - then) / (m - n):.3f}", flush=True)


if __name__ == "__main__":
    main()
