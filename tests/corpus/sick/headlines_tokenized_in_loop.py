"""Trains a topic model of news headlines: bags of BPE tokens into an MLP.

"The model is two matrices, and a step takes 60 ms."
"""

import os
import random
import time

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
torch.set_num_threads(1)
chance = random.Random(11)
words = ["".join(chance.choices("abcdefghiklmnoprstuvw", k=chance.randint(3, 12))) for _ in range(3000)]
headlines = [" ".join(chance.choices(words, k=60)) for _ in range(4096)]

tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer.train_from_iterator(words, trainers.BpeTrainer(vocab_size=2000, show_progress=False))
ready = [torch.tensor(tokenizer.encode(text).ids) for text in headlines] if CURED else None

bag = nn.EmbeddingBag(2000, 256)
head = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 20))
optimizer = torch.optim.SGD([*bag.parameters(), *head.parameters()], lr=0.1)
began, warm, step = time.perf_counter(), None, 0
while True:
    picked = torch.randint(4096, (256,)).tolist()
    if ready is not None:
        ids = [ready[index] for index in picked]
    else:
        encoded = tokenizer.encode_batch([headlines[index] for index in picked])  # cause: hot-line
        ids = [torch.tensor(each.ids) for each in encoded]
    offsets = torch.tensor([0, *map(len, ids[:-1])]).cumsum(0)
    logits = head(bag(torch.cat(ids), offsets))
    loss = nn.functional.cross_entropy(logits, torch.tensor(picked) % 20)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    now = time.perf_counter()
    if warm is None and now - began > 2:
        warm = step, now
    if now - began > SECONDS:
        break
print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
