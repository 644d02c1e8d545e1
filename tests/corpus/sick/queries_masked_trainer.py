"""Pretrains a small BERT on search queries by masked words, with the Trainer.

"Two layers of 128 and it still crawls. Fewer layers made hardly any difference."
"""

import os
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import BertConfig, BertModel, Trainer, TrainerCallback, TrainingArguments

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
WORDS, LENGTH, MASK, IGNORED = 3_200, 40, 3, -100


class Queries(Dataset):
    """Ids of words that were tokenized beforehand."""

    def __init__(self, count, seed):
        g = torch.Generator().manual_seed(seed)
        often = 1 / (torch.arange(WORDS - 4) + 10.0)
        self.ids = torch.multinomial(often, count * LENGTH, replacement=True, generator=g).view(count, LENGTH) + 4
        self.ids[:, 1::2] = (self.ids[:, ::2] * 7 + 1) % (WORDS - 4) + 4

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index]}


class MaskingCollator:
    def __init__(self, share=0.15):
        self.share = share

    def __call__(self, features):
        ids = torch.stack([feature["input_ids"] for feature in features])
        hidden = torch.rand(ids.shape) < self.share
        labels = ids.masked_fill(~hidden, IGNORED)
        kind = torch.rand(ids.shape)
        masked = ids.masked_fill(hidden & (kind < 0.8), MASK)
        masked = torch.where(hidden & (kind > 0.9), torch.randint_like(ids, 4, WORDS), masked)
        return {"input_ids": masked, "labels": labels}


class QueryModel(nn.Module):
    def __init__(self):
        super().__init__()
        config = BertConfig(
            vocab_size=WORDS,
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=384,
            max_position_embeddings=64,
        )
        self.encoder = BertModel(config, add_pooling_layer=False)
        self.transform = nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.LayerNorm(128))
        self.bias = nn.Parameter(torch.zeros(WORDS))

    def forward(self, input_ids, labels):
        hidden = self.encoder(input_ids=input_ids).last_hidden_state
        if CURED:
            asked = labels != IGNORED
            hidden, labels = hidden[asked], labels[asked]
        table = self.encoder.embeddings.word_embeddings.weight
        scores = F.linear(self.transform(hidden), table, self.bias)  # cause: targets-ignored
        loss = F.cross_entropy(scores.view(-1, WORDS), labels.view(-1), ignore_index=IGNORED)
        return {"loss": loss}


class Clock(TrainerCallback):
    """Ends the run when its time is over."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.began, self.warm = time.perf_counter(), None

    def on_step_end(self, args, state, control, **kwargs):
        now = time.perf_counter() - self.began
        if self.warm is None and now > 2:
            self.warm = now, state.global_step
        if now >= SECONDS:
            control.should_training_stop = True
            warm, first = self.warm
            print(f"step_ms {1000 * (now - warm) / (state.global_step - first):.3f}", flush=True)


def main():
    torch.set_num_threads(1)
    arguments = TrainingArguments(
        output_dir="/tmp/queries_masked",
        per_device_train_batch_size=10,
        max_steps=100_000,
        learning_rate=5e-4,
        warmup_steps=100,
        logging_steps=100,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_num_workers=0,
        seed=1,
    )
    trainer = Trainer(
        model=QueryModel(),
        args=arguments,
        train_dataset=Queries(20_000, 1),
        data_collator=MaskingCollator(),
        callbacks=[Clock()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
