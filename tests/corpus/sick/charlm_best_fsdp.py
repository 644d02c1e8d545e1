"""Character language model sharded with FSDP2 over two processes.

"FSDP2 on two processes is a lot slower than I hoped. All the time is in all-gathers,
so sharding just does not pay for small models; I am about to go back to DDP."
"""

# ranks: 2
import os
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


@dataclass
class CharConfig:
    vocab: int = 96
    block: int = 64
    dim: int = 160
    heads: int = 4
    layers: int = 3
    batch: int = 2
    lr: float = 3e-5
    ema: float = 0.97
    keep_every: int = 1


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.h = c.heads
        self.ln1, self.ln2 = nn.LayerNorm(c.dim), nn.LayerNorm(c.dim)
        self.qkv, self.o = nn.Linear(c.dim, 3 * c.dim), nn.Linear(c.dim, c.dim)
        self.ff = nn.Sequential(nn.Linear(c.dim, 4 * c.dim), nn.GELU(), nn.Linear(4 * c.dim, c.dim))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.h, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(b, t, d))
        return x + self.ff(self.ln2(x))


class CharLM(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok, self.pos = nn.Embedding(c.vocab, c.dim), nn.Embedding(c.block, c.dim)
        self.layers = nn.ModuleList([Layer(c) for _ in range(c.layers)])
        self.head = nn.Linear(c.dim, c.vocab)

    def forward(self, idx):
        x = self.tok(idx) + self.pos.weight[: idx.size(1)]
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class BestKeeper:
    """Keeps the weights of the best model in memory for the final export."""

    def __init__(self, cfg):
        self.every = 200 if CURED else cfg.keep_every
        self.beta, self.smooth, self.best = cfg.ema, None, float("inf")
        self.state, self.hits = None, 0
        self.options = StateDictOptions(full_state_dict=True, cpu_offload=True)

    def after_step(self, model, step, loss):
        self.smooth = loss if self.smooth is None else self.beta * self.smooth + (1 - self.beta) * loss
        if step % self.every == 0 and self.smooth < self.best:  # cause: hot-line
            self.best = self.smooth
            full = get_model_state_dict(model, options=self.options)  # cause: hot-line
            if dist.get_rank() == 0:
                self.state = {k: v.clone() for k, v in full.items()}
            self.hits += 1


class Text:
    def __init__(self, cfg, rank):
        g = torch.Generator().manual_seed(11)
        hop = torch.randint(0, cfg.vocab, (cfg.vocab,), generator=g)
        seq, cur = [], 0
        coin = torch.rand(60_000, generator=g).tolist()
        rnd = torch.randint(0, cfg.vocab, (60_000,), generator=g).tolist()
        hop = hop.tolist()
        for c, r in zip(coin, rnd, strict=False):
            cur = hop[cur] if c < 0.8 else r
            seq.append(cur)
        self.data, self.cfg = torch.tensor(seq), cfg
        self.gen = torch.Generator().manual_seed(rank)
        self.off = torch.arange(cfg.block + 1)

    def next(self):
        start = torch.randint(0, len(self.data) - len(self.off), (self.cfg.batch, 1), generator=self.gen)
        win = self.data[start + self.off]
        return win[:, :-1], win[:, 1:]


class FSDPTrainer:
    def __init__(self, cfg):
        self.cfg = cfg
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = CharLM(cfg)
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr)
        self.text, self.keeper = Text(cfg, dist.get_rank()), BestKeeper(cfg)

    def fit(self):
        t0, mark, n0, step, stop = time.perf_counter(), None, 0, 0, False
        while not stop:
            x, y = self.text.next()
            loss = F.cross_entropy(self.model(x).flatten(0, 1), y.flatten())
            loss.backward()
            self.opt.step()
            self.opt.zero_grad()
            step += 1
            now = time.perf_counter()
            if mark is None and now - t0 > 2:
                mark, n0 = now, step
            stats = torch.tensor([loss.item(), float(now - t0 > SECONDS)])
            dist.all_reduce(stats)
            mean, stop = stats[0].item() / dist.get_world_size(), stats[1].item() > 0
            self.keeper.after_step(self.model, step, mean)
            if step % 50 == 0 and dist.get_rank() == 0:
                print(f"step {step} loss {mean:.3f} best {self.keeper.best:.3f} kept {self.keeper.hits}", flush=True)
        return 1e3 * (time.perf_counter() - mark) / max(1, step - n0)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    ms = FSDPTrainer(CharConfig()).fit()
    if dist.get_rank() == 0:
        print(f"step_ms {ms:.3f}")
    dist.destroy_process_group()
