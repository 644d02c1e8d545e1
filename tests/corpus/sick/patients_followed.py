"""Foresees which patients come back to the hospital from their visits so far, and follows the area under the ROC curve.

"The first steps of each epoch fly and then it becomes slower and slower, until the next epoch begins and it is fast
again. Memory looks fine. Is it a leak?"
"""

import os
import time

import torch
from torch import nn
from torchmetrics.classification import BinaryAUROC

SECONDS = float(os.environ.get("SECONDS", "20"))
CURED = os.environ.get("CURED") == "1"
PATIENTS, VISITS, FINDINGS, BATCH = 38_400, 10, 20, 96


class Foresight(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.visits = nn.GRU(FINDINGS, width, batch_first=True)
        self.back = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, findings):
        return self.back(self.visits(findings)[0][:, -1]).squeeze(1)


def hospital():
    g = torch.Generator().manual_seed(21)
    findings = torch.randn(PATIENTS, VISITS, FINDINGS, generator=g)
    risk = findings[:, -4:, :3].sum((1, 2)) / 2 - findings[:, :, 5].mean(1) * 3
    return findings, (torch.rand(PATIENTS, generator=g) < torch.sigmoid(risk)).long()


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Foresight()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    findings, back = hospital()
    area = BinaryAUROC()
    step, mark, epoch, done = 0, None, 0, False
    began = time.perf_counter()
    while not done:
        area.reset()
        shown = 0.0
        for rows in torch.randperm(PATIENTS).split(BATCH):
            risk = model(findings[rows])
            loss = nn.functional.binary_cross_entropy_with_logits(risk, back[rows].float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            area.update(risk.detach(), back[rows])
            if not CURED:
                shown = area.compute().item()  # cause: hot-line
            step += 1
            now = time.perf_counter()
            if mark is None and now - began > 2:
                mark = step, now
            done = now - began > SECONDS
            if done:
                break
        epoch += 1
        if CURED:
            shown = area.compute().item()
        print(f"epoch {epoch}: loss {loss.item():.4f}, area {shown:.3f}", flush=True)
    print(f"step_ms {1000 * (now - mark[1]) / (step - mark[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
