"""Train a two-layer graph convolutional network on a synthetic citation graph, full batch.

Community graph with class-dependent features; semi-supervised node classification,
DropEdge-free baseline for a comparison.

"Changing the hidden size from 16 to 64 hardly moves the step time, so it can't be the
matmuls, but the profile is full of sorting and indexing that I never call."
"""

import os
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
torch.set_num_threads(1)

NODES, DEG, CLASSES, FEAT, HIDDEN = 6_000, 6, 7, 64, 16


def citation_graph(seed=0):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CLASSES, (NODES,), generator=g)
    order = torch.argsort(y)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(NODES)
    src = torch.arange(NODES).repeat_interleave(DEG)
    hop = torch.randint(-300, 300, src.shape, generator=g)
    dst = order[(rank[src] + hop) % NODES]
    edge_index = torch.stack([torch.cat([src, dst]), torch.cat([dst, src])])
    x = torch.randn(NODES, FEAT, generator=g)
    x += 0.7 * torch.randn(CLASSES, FEAT, generator=g)[y]
    train = torch.rand(NODES, generator=g) < 0.1
    return x, y, edge_index, train


class GraphConv(nn.Module):
    """Kipf & Welling propagation: D^-1/2 (A + I) D^-1/2 X W."""

    def __init__(self, cin, cout):
        super().__init__()
        self.lin = nn.Linear(cin, cout)
        self._adj = None

    @staticmethod
    def normalized(edge_index, n):
        loops = torch.arange(n).repeat(2, 1)
        ei = torch.cat([edge_index, loops], 1)
        a = torch.sparse_coo_tensor(ei, torch.ones(ei.shape[1]), (n, n), check_invariants=False).coalesce()
        row, col = a.indices()
        val = a.values().clamp(max=1.0)
        deg = torch.zeros(n).index_add_(0, row, val)
        val = val * deg[row].rsqrt() * deg[col].rsqrt()
        return row, col, val[:, None]

    def forward(self, x, edge_index):
        if CURED:
            if self._adj is None:
                self._adj = self.normalized(edge_index, x.shape[0])
            adj = self._adj
        else:
            adj = self.normalized(edge_index, x.shape[0])  # cause: hot-line
        row, col, val = adj
        h = self.lin(x)
        return torch.zeros_like(h).index_add(0, row, val * h[col])


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = GraphConv(FEAT, HIDDEN)
        self.c2 = GraphConv(HIDDEN, CLASSES)

    def forward(self, x, ei):
        x = F.dropout(x, 0.5, self.training)
        x = F.relu(self.c1(x, ei))
        x = F.dropout(x, 0.5, self.training)
        return self.c2(x, ei)


@torch.no_grad()
def accuracy(model, x, y, ei, mask):
    model.eval()
    acc = (model(x, ei).argmax(1) == y)[mask].float().mean().item()
    model.train()
    return acc


def run():
    torch.manual_seed(0)
    x, y, ei, train = citation_graph()
    model = GCN()
    opt = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    it, warm = 0, None
    start = time.perf_counter()
    while True:
        t = time.perf_counter() - start
        if warm is None and t > 2.0:
            warm = (t, it)
        if t > SECONDS:
            break
        opt.zero_grad()
        loss = F.cross_entropy(model(x, ei)[train], y[train])
        loss.backward()
        opt.step()
        it += 1
        if it % 100 == 0:
            print(f"it {it} loss {loss.item():.3f} test acc {accuracy(model, x, y, ei, ~train):.3f}")
    print(f"step_ms {(t - warm[0]) / max(1, it - warm[1]) * 1e3:.3f}", flush=True)


run()
