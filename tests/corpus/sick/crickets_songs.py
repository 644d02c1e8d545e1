"""Tells crickets by their songs: a mel spectrogram inside of the model, so that it can be exported, and convolutions.

"The spectrogram is part of the model and runs on whole batches, it should be cheap."
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
RATE, LENGTH, KINDS = 16_000, 8_000, 10


def mel_bank(bands, bins, low=300.0, high=8000.0):
    """Triangles that are equally wide on the mel scale."""
    ends = 2595 * torch.log10(1 + torch.tensor([low, high]) / 700)
    edges = 700 * (10 ** (torch.linspace(ends[0], ends[1], bands + 2) / 2595) - 1)
    hertz = torch.linspace(0, RATE / 2, bins)
    bank = torch.zeros(bins, bands)
    for band in range(bands):
        left, middle, right = edges[band], edges[band + 1], edges[band + 2]
        up, down = (hertz - left) / (middle - left), (right - hertz) / (right - middle)
        bank[:, band] = torch.clamp(torch.minimum(up, down), min=0)
        bank[:, band] *= 2 / (right - left)
    return bank


class LogMel(nn.Module):
    def __init__(self, size=512, hop=160, bands=64):
        super().__init__()
        self.size, self.hop, self.bands = size, hop, bands
        if CURED:
            self.register_buffer("bank", mel_bank(bands, size // 2 + 1), persistent=False)
            self.register_buffer("window", torch.hann_window(size), persistent=False)

    def forward(self, wave):
        if CURED:
            bank, window = self.bank, self.window
        else:
            window = torch.hann_window(self.size, device=wave.device)
            bank = mel_bank(self.bands, self.size // 2 + 1).to(wave)  # cause: hot-line
        power = torch.stft(wave, self.size, self.hop, window=window, return_complex=True).abs().square()
        return torch.log(torch.einsum("bft,fm->bmt", power, bank) + 1e-6)


class Songs(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.features = LogMel()
        self.norm = nn.BatchNorm1d(64)
        self.body = nn.Sequential(
            nn.Conv1d(64, width, 5, padding=2), nn.ReLU(), nn.Conv1d(width, width, 3, padding=1), nn.ReLU(),
            nn.MaxPool1d(2), nn.Conv1d(width, 64, 3), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(64, KINDS)

    def forward(self, wave):
        return self.head(self.body(self.norm(self.features(wave))).mean(2))


class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 2e-3, total_steps=100_000)
        self.kinds = torch.randint(0, KINDS, (800,))
        moment = torch.arange(LENGTH) / RATE
        pitch = 1000 + 500 * self.kinds[:, None] + 50 * torch.randn(800, 1)
        chirps = torch.sin(6.283 * pitch * moment) * (torch.sin(6.283 * 30 * moment) > 0)
        self.waves = chirps + 0.3 * torch.randn(800, LENGTH)
        self.seen, self.right = 0, torch.zeros(())

    def train_step(self):
        rows = torch.randint(len(self.waves), (16,))
        logits = self.model(self.waves[rows])
        loss = nn.functional.cross_entropy(logits, self.kinds[rows])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.right += (logits.argmax(1) == self.kinds[rows]).sum()
        self.seen += len(rows)

    def report(self):
        print(f"accuracy {self.right.item() / self.seen:.3f}", flush=True)
        self.seen, self.right = 0, torch.zeros(())


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    trainer = Trainer(Songs())
    began, warm, step = time.perf_counter(), None, 0
    while True:
        trainer.train_step()
        step += 1
        if step % 200 == 0:
            trainer.report()
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
