"""Distils a large classifier of star spectra into a small one that fits on the telescope (with Accelerate).

"The teacher only predicts, but training takes three times as long as without it."
"""

import os
import time

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
PATCH, PATCHES, CLASSES, TEMPERATURE = 16, 32, 10, 3.0


class SpectrumFormer(nn.Module):
    def __init__(self, width, depth, heads):
        super().__init__()
        self.patches = nn.Linear(PATCH, width)
        self.places = nn.Parameter(torch.randn(PATCHES, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, heads, 2 * width, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
        )
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, spectrum):
        x = self.patches(spectrum.unflatten(1, (PATCHES, PATCH))) + self.places
        return self.head(self.encoder(x).mean(1))


def distillation_loss(student_logits, teacher_logits, labels, alpha=0.7):
    soft = F.kl_div(
        F.log_softmax(student_logits / TEMPERATURE, dim=1),
        F.softmax(teacher_logits / TEMPERATURE, dim=1),
        reduction="batchmean",
    )
    hard = F.cross_entropy(student_logits, labels)
    return alpha * TEMPERATURE**2 * soft + (1 - alpha) * hard


def stars(count=8192):
    generator = torch.Generator().manual_seed(11)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    lines = torch.randn(CLASSES, PATCH * PATCHES, generator=generator)
    return TensorDataset(lines[labels] + torch.randn(count, PATCH * PATCHES, generator=generator), labels)


def train():
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    teacher = SpectrumFormer(width=128, depth=3, heads=4).eval()
    student = SpectrumFormer(width=64, depth=2, heads=4)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3, weight_decay=0.01)
    loader = DataLoader(stars(), batch_size=16, shuffle=True, drop_last=True)
    teacher, student, optimizer, loader = accelerator.prepare(teacher, student, optimizer, loader)

    began = time.perf_counter()
    warm, step = None, 0
    while True:
        for spectrum, label in loader:
            with torch.set_grad_enabled(not CURED):
                guidance = teacher(spectrum)  # cause: gradients-unused no-line
            loss = distillation_loss(student(spectrum), guidance, label)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(student.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 100 == 0:
                accelerator.print(f"{step}: {loss.item():.4f}")
            now = time.perf_counter()
            if warm is None and now - began > 2:
                warm = (step, now)
            if now - began > SECONDS:
                accelerator.print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
                return


if __name__ == "__main__":
    train()
