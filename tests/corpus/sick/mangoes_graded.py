"""Fine-tunes the last stage and the head of a pretrained network to grade mangoes from photographs.

The first stages stay as they came: there are too few photographs to touch them.

"I only train the last stage, some 40 % of the network, and I hoped the iterations would get a lot cheaper than
full fine-tuning. They take the same time. Memory is the same, too."
"""

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
GRADES = 5


def block(inputs, outputs, stride):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
        nn.GroupNorm(4, outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
        nn.GroupNorm(4, outputs),
        nn.ReLU(),
    )


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = block(3, 16, 2)
        self.middle = block(16, 32, 2)
        self.last = nn.Sequential(block(32, 64, 2), block(64, 64, 1))
        self.head = nn.Linear(64, GRADES)

    def forward(self, photo):
        x = self.last(self.middle(self.stem(photo)))
        return self.head(x.mean((2, 3)))


def pretrained():
    """Stands for the download: the weights are drawn."""
    torch.manual_seed(17)
    return Network()


def photographs(n=768):
    g = torch.Generator().manual_seed(2)
    grade = torch.randint(GRADES, (n,), generator=g)
    photo = 0.4 * torch.randn(n, 3, 64, 64, generator=g)
    photo[:, 0] += grade[:, None, None] / GRADES
    return TensorDataset(photo, grade)


def main():
    torch.set_num_threads(1)
    model = pretrained()
    loader = DataLoader(photographs(), batch_size=16, shuffle=True, drop_last=True)
    if CURED:
        model.stem.requires_grad_(False)
        model.middle.requires_grad_(False)
    optimizer = torch.optim.SGD(
        [*model.last.parameters(), *model.head.parameters()],  # cause: gradients-unused no-line
        lr=0.02,
        momentum=0.9,
        nesterov=True,
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5000)
    step, mark, epoch, t0 = 0, None, 0, time.perf_counter()
    now = t0
    while now - t0 < SECONDS:
        right = torch.zeros(())
        for photo, grade in loader:
            logits = model(photo)
            loss = nn.functional.cross_entropy(logits, grade, label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            right += (logits.detach().argmax(1) == grade).sum()
            step += 1
            now = time.perf_counter()
            if mark is None and now - t0 > 2:
                mark = step, now
            if now - t0 > SECONDS:
                break
        epoch += 1
        print(f"epoch {epoch}: right {right.item() / 768:.3f}", flush=True)
    print(f"step_ms {1000 * (now - mark[1]) / (step - mark[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
