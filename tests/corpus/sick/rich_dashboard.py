"""A convolutional autoencoder for spectra, with a pretty table of the gradients written after each step.
Author's remark: "tail -f train.log is my TensorBoard"."""

import os
import tempfile
import time

import torch
import torch.nn as nn
from rich.console import Console
from rich.table import Table

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


class AutoEncoder(nn.Module):
    def __init__(self, c=32):
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv1d(1, c, 7, 2, 3),
            nn.ELU(),
            nn.Conv1d(c, 2 * c, 5, 2, 2),
            nn.ELU(),
            nn.Conv1d(2 * c, 2 * c, 5, 2, 2),
            nn.ELU(),
        )
        self.up = nn.Sequential(
            nn.ConvTranspose1d(2 * c, 2 * c, 4, 2, 1),
            nn.ELU(),
            nn.ConvTranspose1d(2 * c, c, 4, 2, 1),
            nn.ELU(),
            nn.ConvTranspose1d(c, 1, 4, 2, 1),
        )

    def forward(self, x):
        return self.up(self.down(x))


class Dashboard:
    def __init__(self, path, every):
        self.file = open(path, "w")
        self.console = Console(file=self.file, width=110, force_terminal=True)
        self.every = every

    def show(self, step, loss, model):
        if step % self.every:
            return
        table = Table(title=f"step {step}  loss {loss:.5f}")
        for name in ("tensor", "shape", "norm", "gradient", "ratio"):
            table.add_column(name, justify="right")
        for name, p in model.named_parameters():
            w, g = p.norm().item(), p.grad.norm().item()
            colour = "red" if g > w else "green"
            table.add_row(name, str(tuple(p.shape)), f"{w:.4f}", f"[{colour}]{g:.6f}[/]", f"{g / (w + 1e-9):.2e}")
        self.console.print(table)  # cause: logging-stall or hot-line
        self.file.flush()


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoEncoder()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    grid = torch.linspace(0, 1, 256)
    with tempfile.TemporaryDirectory() as folder:
        board = Dashboard(os.path.join(folder, "train.log"), 100 if CURED else 1)
        t0, warm, step = time.perf_counter(), None, 0
        while True:
            centre, width = torch.rand(36, 1), 0.02 + 0.1 * torch.rand(36, 1)
            x = torch.exp(-(((grid - centre) / width) ** 2)).unsqueeze(1)
            loss = nn.functional.mse_loss(model(x + 0.05 * torch.randn_like(x)), x)
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
            board.show(step, loss.item(), model)
            now = time.perf_counter()
            if warm is None and now - t0 > 2:
                warm = (now, step)
            if now - t0 > SECONDS:
                break
    print(f"step_ms {(now - warm[0]) * 1e3 / (step - warm[1]):.3f}", flush=True)


if __name__ == "__main__":
    main()
