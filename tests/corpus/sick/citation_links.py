"""Node classification on a citation graph with a hand-written GCN.

"No torch_geometric allowed at our institute, so I wrote the propagation rule of
the paper myself with torch.sparse. Sparse matmul on CPU is known to be slow, so
there is nothing to be done except buying a bigger machine."
"""

import os
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"

N_PAPERS, N_CITES, N_WORDS, N_TOPICS = 6000, 40000, 96, 7


def synthetic_graph():
    g = torch.Generator().manual_seed(3)
    topic = torch.randint(0, N_TOPICS, (N_PAPERS,), generator=g)
    src = torch.randint(0, N_PAPERS, (N_CITES,), generator=g)
    by_topic = torch.argsort(topic)
    pos = torch.empty_like(by_topic)
    pos[by_topic] = torch.arange(N_PAPERS)
    hop = torch.randint(-400, 400, (N_CITES,), generator=g)
    dst = by_topic[(pos[src] + hop).clamp(0, N_PAPERS - 1)]
    words = torch.randn(N_TOPICS, N_WORDS, generator=g)[topic] + 2.5 * torch.randn(N_PAPERS, N_WORDS, generator=g)
    return words, torch.stack([src, dst]), topic


def normalised_adjacency(edges, n):
    """D^-1/2 (A + A^T + I) D^-1/2, duplicates merged."""
    loops = torch.arange(n).repeat(2, 1)
    both = torch.cat([edges, edges.flip(0), loops], dim=1)
    a = torch.sparse_coo_tensor(both, torch.ones(both.shape[1]), (n, n)).coalesce()
    idx, val = a.indices(), a.values().clamp(max=1.0)
    deg = torch.zeros(n).index_add_(0, idx[0], val)
    d = deg.pow(-0.5)
    return torch.sparse_coo_tensor(idx, val * d[idx[0]] * d[idx[1]], (n, n)).coalesce()


class GraphConv(nn.Module):
    def __init__(self, fin, fout):
        super().__init__()
        self.lin = nn.Linear(fin, fout)
        self._adj = None

    def forward(self, x, edges):
        if not CURED or self._adj is None:
            self._adj = normalised_adjacency(edges, x.shape[0])  # cause: hot-line
        return torch.sparse.mm(self._adj, self.lin(x))


class GCN(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.c1 = GraphConv(N_WORDS, hidden)
        self.c2 = GraphConv(hidden, hidden)
        self.c3 = GraphConv(hidden, N_TOPICS)

    def forward(self, x, edges):
        x = F.dropout(F.relu(self.c1(x, edges)), 0.3, self.training)
        x = F.dropout(F.relu(self.c2(x, edges)), 0.3, self.training)
        return self.c3(x, edges)


def run():
    torch.manual_seed(0)
    words, edges, topic = synthetic_graph()
    labelled = torch.randperm(N_PAPERS)[:2000]
    net = GCN()
    optim = torch.optim.Adam(net.parameters(), lr=5e-3, weight_decay=5e-4)
    began = time.perf_counter()
    warm = None
    it = 0
    while True:
        optim.zero_grad(set_to_none=True)
        logits = net(words, edges)
        loss = F.cross_entropy(logits[labelled], topic[labelled])
        loss.backward()
        optim.step()
        it += 1
        elapsed = time.perf_counter() - began
        if it % 100 == 0:
            print(f"iter {it} loss {loss.item():.4f}")
        if warm is None and elapsed > 2.0:
            warm = (elapsed, it)
        if elapsed > SECONDS:
            break
    print("step_ms %.3f" % ((elapsed - warm[0]) / (it - warm[1]) * 1000))


if __name__ == "__main__":
    run()
