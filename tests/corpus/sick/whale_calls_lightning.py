"""Recognizes the calls of whales with Lightning, and shows the accuracy of each batch in the progress bar.

"The accuracy in the bar is what I watch. It is only one more line, and without gradients it is nearly free."
"""

import logging
import os
import time
import warnings

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


class Calls(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(1, 24, 9, stride=2, padding=4),
            nn.ReLU(),
            nn.Conv1d(24, 48, 9, stride=2, padding=4),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(8),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(384, 12),
        )

    def forward(self, sound):
        return self.net(sound)

    def training_step(self, batch, _):
        sound, species = batch
        logits = self(sound)
        loss = nn.functional.cross_entropy(logits, species)
        with torch.no_grad():
            if CURED:
                accuracy = (logits.argmax(1) == species).float().mean()
            else:
                accuracy = (self(sound).argmax(1) == species).float().mean()  # cause: hot-line
        self.log("accuracy", accuracy, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


class Clock(lightning.Callback):
    began = warm = None
    step = 0

    def on_train_start(self, trainer, module):
        self.began = time.perf_counter()

    def on_train_batch_end(self, trainer, module, *_):
        self.step += 1
        now = time.perf_counter()
        if self.warm is None and now - self.began > 2:
            self.warm = self.step, now
        if now - self.began > SECONDS:
            trainer.should_stop = True
            self.pace_ms = 1000 * (now - self.warm[1]) / (self.step - self.warm[0])


warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.set_num_threads(1)
torch.manual_seed(0)
sounds = TensorDataset(torch.randn(2_048, 1, 1_600), torch.randint(0, 12, (2_048,)))
clock = Clock()
trainer = lightning.Trainer(
    max_epochs=-1,
    accelerator="cpu",
    devices=1,
    logger=False,
    callbacks=[clock],
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Calls(), DataLoader(sounds, batch_size=16, shuffle=True))
print(f"step_ms {clock.pace_ms:.3f}", flush=True)
