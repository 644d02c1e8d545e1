"""Names worn coins by scanned points of their surface, with a graph of nearest neighbours that each layer makes anew.

"All distances between all points, in each layer and at each step! Is there no way to compute the graph only once?"
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
POINTS, NEAR, KINDS = 96, 8, 9


class EdgeConv(nn.Module):
    """The neighbours are those in the space of the features, which are learned, so they change."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2 * inputs, outputs), nn.ReLU(), nn.Linear(outputs, outputs))

    def forward(self, x):
        with torch.no_grad():
            near = torch.cdist(x, x).topk(NEAR, largest=False).indices
        clouds = torch.arange(len(x))[:, None, None]
        there = x[clouds, near]
        here = x[:, :, None].expand_as(there)
        return self.net(torch.cat([here, there - here], -1)).amax(2)


class CoinNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = EdgeConv(3, 48), EdgeConv(48, 64)
        self.kind = nn.Sequential(nn.Linear(112, 128), nn.ReLU(), nn.Linear(128, KINDS))

    def forward(self, points):
        a = self.a(points)
        b = self.b(a)
        return self.kind(torch.cat([a, b], -1).amax(1))


class Workshop:
    def __init__(self):
        g = torch.Generator().manual_seed(6)
        self.kinds = torch.randint(KINDS, (1_500,), generator=g)
        coins = torch.randn(KINDS, POINTS, 3, generator=g)
        self.points = coins[self.kinds] + 0.1 * torch.randn(1_500, POINTS, 3, generator=g)
        self.model = CoinNet()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3, fused=True)
        self.right, self.seen = torch.zeros(()), 0

    def train_step(self, rows):
        turn = torch.linalg.qr(torch.randn(3, 3)).Q
        logits = self.model(self.points[rows] @ turn)
        loss = nn.functional.cross_entropy(logits, self.kinds[rows])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.right += (logits.detach().argmax(1) == self.kinds[rows]).sum()
        self.seen += len(rows)

    def run(self):
        began, warm, step = time.perf_counter(), None, 0
        while True:
            for rows in torch.randperm(len(self.kinds)).split(12):
                self.train_step(rows)
                step += 1
                now = time.perf_counter()
                if warm is None and now - began > 2:
                    warm = step, now
                if now - began > SECONDS:
                    return 1000 * (now - warm[1]) / (step - warm[0])
            print(f"step {step} right {self.right.item() / self.seen:.3f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"step_ms {Workshop().run():.3f}", flush=True)
