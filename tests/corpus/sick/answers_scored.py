"""Scores short answers of pupils with a small BERT, whose lower layers learn more slowly than its upper ones.

The recipe is that of many competition notebooks: layer-wise learning rates, no decay for norms and biases,
a cosine schedule with warm-up.

The optimizer is the one that these notebooks bring along.

"The same BERT in the example script that came with the library makes more steps in a minute."
"""

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertModel, get_cosine_schedule_with_warmup

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


class Config:
    words, length, batch = 800, 8, 4
    width, layers, heads = 192, 6, 4
    rate, layer_decay, weight_decay = 5e-4, 0.9, 0.01


class Answers(Dataset):
    def __init__(self, cfg, count=4_000, seed=5):
        g = torch.Generator().manual_seed(seed)
        self.words = torch.randint(1, cfg.words, (count, cfg.length), generator=g)
        self.scores = (self.words[:, ::4].float().mean(1) / cfg.words - 0.5) * 6

    def __len__(self):
        return len(self.words)

    def __getitem__(self, i):
        return self.words[i], self.scores[i]


class Scorer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.bert = BertModel(
            BertConfig(
                vocab_size=cfg.words, hidden_size=cfg.width, num_hidden_layers=cfg.layers,
                num_attention_heads=cfg.heads, intermediate_size=2 * cfg.width, max_position_embeddings=cfg.length,
            ),
            add_pooling_layer=False,
        )  # fmt: skip
        self.head = nn.Linear(cfg.width, 1)

    def forward(self, words):
        return self.head(self.bert(words).last_hidden_state.mean(1)).squeeze(1)


def depth_of(name, layers):
    if name.startswith("head"):
        return 0
    if "embeddings" in name:
        return layers + 1
    return layers - int(name.split("layer.")[1].split(".")[0])


def parameter_groups(model, cfg):
    together = {}
    for name, weight in model.named_parameters():
        depth, plain = depth_of(name, cfg.layers), name.endswith("bias") or "LayerNorm" in name
        group = {
            "params": [weight],
            "lr": cfg.rate * cfg.layer_decay**depth,
            "weight_decay": 0.0 if plain else cfg.weight_decay,
        }
        if (depth, plain) in together:
            together[depth, plain]["params"].append(weight)
        else:
            together[depth, plain] = group
    return list(together.values())


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:  # cause: hot-line
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
                state["step"] += 1
                exp_avg.mul_(beta1).add_(p.grad, alpha=1.0 - beta1)
                exp_avg_sq.mul_(beta2).addcmul_(p.grad, p.grad, value=1.0 - beta2)
                denom = exp_avg_sq.sqrt().add_(group["eps"])
                size = group["lr"] * (1.0 - beta2 ** state["step"]) ** 0.5 / (1.0 - beta1 ** state["step"])
                p.addcdiv_(exp_avg, denom, value=-size)
                if group["weight_decay"] > 0.0:
                    p.add_(p, alpha=-group["lr"] * group["weight_decay"])


class Fold:
    def __init__(self, cfg):
        self.model = Scorer(cfg)
        groups = parameter_groups(self.model, cfg)
        self.optimizer = torch.optim.AdamW(groups, eps=1e-6, fused=True) if CURED else AdamW(groups)
        self.scheduler = get_cosine_schedule_with_warmup(self.optimizer, 100, 50_000)
        self.loss = nn.SmoothL1Loss(beta=0.5)
        self.seen, self.total = 0, torch.zeros(())

    def train_step(self, words, scores):
        self.optimizer.zero_grad()
        loss = self.loss(self.model(words), scores)
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.total += loss.detach()
        self.seen += 1

    def fit(self, loader):
        began, warm = time.perf_counter(), None
        while True:
            for words, scores in loader:
                self.train_step(words, scores)
                now = time.perf_counter()
                if warm is None and now - began > 2:
                    warm = self.seen, now
                if now - began > SECONDS:
                    return 1000 * (now - warm[1]) / (self.seen - warm[0])
            print(f"loss {self.total.item() / self.seen:.4f}")


def main():
    torch.set_num_threads(1)
    torch.manual_seed(7)
    cfg = Config()
    loader = DataLoader(Answers(cfg), batch_size=cfg.batch, shuffle=True, drop_last=True)
    print(f"step_ms {Fold(cfg).fit(loader):.3f}", flush=True)


if __name__ == "__main__":
    main()
