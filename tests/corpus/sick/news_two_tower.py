"""Two-tower retrieval for news: readers and articles, in-batch negatives, Adagrad.

"Our catalogue grew from ten thousand to many articles and the iteration became slower and slower, with the
same batch size and the same towers. I thought looking up a row costs the same in any table."
"""

# cause: embedding-gradient-dense no-line
import os
import time

import torch
import torch.nn.functional as F
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"

READERS, ARTICLES, DIM, HISTORY, BATCH = 6_000, 60_000, 16, 10, 256


class ReaderTower(nn.Module):
    def __init__(self, articles):
        super().__init__()
        self.articles = articles
        self.reader = nn.Embedding(READERS, DIM)
        self.mlp = nn.Sequential(nn.Linear(2 * DIM, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64))

    def forward(self, reader, history):
        h = self.articles(history).mean(1)
        return F.normalize(self.mlp(torch.cat([self.reader(reader), h], -1)), dim=-1)


class ArticleTower(nn.Module):
    def __init__(self, articles):
        super().__init__()
        self.articles = articles
        self.mlp = nn.Sequential(nn.Linear(DIM + 8, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64))

    def forward(self, article, features):
        return F.normalize(self.mlp(torch.cat([self.articles(article), features], -1)), dim=-1)


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        if CURED:
            articles = nn.Embedding(ARTICLES, DIM, sparse=True)
        else:
            articles = nn.Embedding(ARTICLES, DIM)
        nn.init.normal_(articles.weight, std=0.05)
        self.reader_tower = ReaderTower(articles)
        self.article_tower = ArticleTower(articles)
        self.scale = nn.Parameter(torch.tensor(10.0))

    def forward(self, reader, history, article, features):
        u = self.reader_tower(reader, history)
        v = self.article_tower(article, features)
        return self.scale * u @ v.T


class ClickLog:
    """Synthetic clicks: popularity falls off like a power law, readers like their own section."""

    def __init__(self):
        self.gen = torch.Generator().manual_seed(8)
        self.section = torch.randint(20, (READERS,), generator=self.gen)
        self.features = torch.randn(ARTICLES, 8, generator=self.gen)

    def articles_for(self, reader, shape):
        within = (torch.rand(shape, generator=self.gen) ** 2 * (ARTICLES // 20)).long()
        sec = self.section[reader].view(-1, *[1] * (len(shape) - 1))
        return (within * 20 + sec).clamp_(max=ARTICLES - 1)

    def batch(self):
        reader = torch.randint(READERS, (BATCH,), generator=self.gen)
        history = self.articles_for(reader, (BATCH, HISTORY))
        article = self.articles_for(reader, (BATCH,))
        return reader, history, article, self.features[article]


def main():
    torch.set_num_threads(1)
    torch.manual_seed(8)
    log, model = ClickLog(), TwoTower()
    opt = torch.optim.Adagrad(model.parameters(), lr=0.05)
    target = torch.arange(BATCH)
    start = time.perf_counter()
    step = warm_step = 0
    warm_time, running = None, 0.0
    while True:
        now = time.perf_counter() - start
        if now > 2 and warm_time is None:
            warm_step, warm_time = step, now
        if now > SECONDS:
            break
        loss = F.cross_entropy(model(*log.batch()), target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        running += loss.detach()
        step += 1
        if step % 100 == 0:
            print(f"{step:>6} loss {running.item() / 100:.4f}")
            running = 0.0
    print(f"step_ms {(now - warm_time) / (step - warm_step) * 1000:.3f}", flush=True)


if __name__ == "__main__":
    main()
