"""Sorts old telegrams by their office with a transformer; they lie in memory as one table of 128 columns.

Each batch is cut to its longest telegram before it goes into the model.

"My tokenizer pads everything to 128, and hardly any telegram has half of that. Is that why it is slow?"
"""

import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SECONDS = float(os.environ.get("SECONDS", "22"))
WIDTH, WORDS, OFFICES = 128, 3000, 16


class Telegrams(Dataset):
    def __init__(self, count=8000):
        generator = torch.Generator().manual_seed(7)
        lengths = torch.randint(12, 49, (count,), generator=generator)
        self.mask = (torch.arange(WIDTH) < lengths[:, None]).long()
        self.tokens = torch.randint(1, WORDS, (count, WIDTH), generator=generator) * self.mask
        self.office = self.tokens[:, 0] % OFFICES

    def __len__(self):
        return len(self.office)

    def __getitem__(self, index):
        return {
            "input_ids": self.tokens[index],
            "attention_mask": self.mask[index],
            "labels": self.office[index],
        }


def trimmed(batch):
    """The batch without the columns that none of its telegrams needs."""
    longest = int(batch["attention_mask"].sum(1).max())
    return batch["input_ids"][:, :longest], batch["attention_mask"][:, :longest], batch["labels"]


class Sorter(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(WIDTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 3 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, OFFICES)

    def forward(self, tokens, mask):
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        x = self.layers(x, src_key_padding_mask=mask == 0)
        return self.out((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    loader = DataLoader(Telegrams(), batch_size=32, shuffle=True, drop_last=True)
    model = Sorter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    began, warm, step, going = time.perf_counter(), None, 0, True
    while going:
        for batch in loader:
            tokens, mask, office = trimmed(batch)
            loss = nn.functional.cross_entropy(model(tokens, mask), office)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 100 == 0:
                print(f"step {step} loss {loss.item():.4f}", flush=True)
            now = time.perf_counter()
            if warm is None and now - began > 2:
                warm = step, now
            if now - began > SECONDS:
                going = False
                break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
