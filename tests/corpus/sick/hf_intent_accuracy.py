"""Fine-tunes a small BERT-like classifier on generated support tickets and prints its training accuracy.

A Trainer subclass keeps the running accuracy, since the Trainer itself only reports the loss.

"With the stock Trainer the very same model and data ran clearly faster. My subclass adds a few lines and
no layers; I expected the accuracy to be free."
"""

import os
import random
import tempfile
import time

import torch
import transformers
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()

INTENTS = {
    "refund": "money back charge invoice card payment twice wrong".split(),
    "login": "password reset account locked email code sign".split(),
    "shipping": "parcel courier late address tracking delivery box".split(),
    "crash": "app screen freezes error update phone version".split(),
}
FILLER = "i the my please help is was not with since yesterday again and to you can".split()
WORDS = ["[PAD]", "[CLS]", *sorted(set(FILLER).union(*INTENTS.values()))]
LENGTH = 32


class Tickets(torch.utils.data.Dataset):
    def __init__(self, count, seed):
        rnd = random.Random(seed)
        index = {word: i for i, word in enumerate(WORDS)}
        names = list(INTENTS)
        rows, labels = [], []
        for _ in range(count):
            label = rnd.randrange(len(names))
            pool = FILLER * 2 + INTENTS[names[label]]
            words = ["[CLS]", *rnd.choices(pool, k=LENGTH - 1)]
            rows.append([index[w] for w in words])
            labels.append(label)
        self.rows, self.labels = torch.tensor(rows), torch.tensor(labels)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "labels": self.labels[i]}


class AccuracyTrainer(Trainer):
    right, seen = 0, 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if model.training and CURED:
            self.count(outputs.logits, inputs)
        elif model.training:
            with torch.no_grad():
                logits = model(**inputs).logits  # cause: hot-line
                self.right += (logits.argmax(-1) == inputs["labels"]).sum().item()
                self.seen += len(logits)
        return (loss, outputs) if return_outputs else loss

    def count(self, logits, inputs):
        self.right += (logits.argmax(-1) == inputs["labels"]).sum().item()
        self.seen += len(logits)

    def log(self, logs, *args, **kwargs):
        if self.seen:
            logs["accuracy"] = round(self.right / self.seen, 4)
            self.right, self.seen = 0, 0
        super().log(logs, *args, **kwargs)


class Watch(TrainerCallback):
    def __init__(self):
        self.start = self.warm = self.step_ms = None

    def on_step_end(self, args, state, control, **kwargs):
        now = time.perf_counter()
        self.start = self.start or now
        if self.warm is None and now - self.start > 2:
            self.warm = now, state.global_step
        if now - self.start > SECONDS:
            self.step_ms = 1000 * (now - self.warm[0]) / (state.global_step - self.warm[1])
            control.should_training_stop = True


def main():
    transformers.set_seed(3)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=LENGTH,
        num_labels=len(INTENTS),
    )
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            use_cpu=True,
            max_steps=1_000_000,
            per_device_train_batch_size=16,
            learning_rate=5e-4,
            lr_scheduler_type="constant",
            logging_steps=100,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        model = BertForSequenceClassification(config)
        AccuracyTrainer(model=model, args=args, train_dataset=Tickets(8000, 1), callbacks=[watch]).train()
    print(f"step_ms {watch.step_ms:.3f}", flush=True)


if __name__ == "__main__":
    main()
