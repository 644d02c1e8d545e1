"""Writes real files of torch into a directory, for the tests that read them without torch. Run once per session."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

TARGET = Path(sys.argv[1])


class TrainingArguments:
    """As transformers pickles it into training_args.bin: an object with its settings as attributes."""

    def __init__(self, *, save_only_model: bool) -> None:
        self.output_dir = "out"
        self.save_only_model = save_only_model


def main() -> None:
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    model = nn.Linear(32, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 32)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 20}

    torch.save(state, TARGET / "new.pt")
    torch.save(state, TARGET / "old.pt", _use_new_zipfile_serialization=False)
    torch.jit.script(nn.ReLU()).save(TARGET / "script.pt")
    torch.serialization.set_crc32_options(False)
    torch.save(state, TARGET / "nocrc.pt")
    torch.serialization.set_crc32_options(True)

    writer = dcp.FileSystemWriter(TARGET / "dcp", thread_count=2)
    dcp.save({**state, "note": "any object"}, storage_writer=writer, no_dist=True)
    dcp.save({"model": state["model"]}, checkpoint_id=TARGET / "dcp_small", no_dist=True)

    # Lightning 7f0c343, src/lightning/pytorch/trainer/connectors/checkpoint_connector.py: dump_checkpoint
    checkpoint = {
        "epoch": 1,
        "global_step": 20,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": state["model"],
        "loops": {},
        "callbacks": {},
        "optimizer_states": [state["optimizer"]],
        "lr_schedulers": [],
    }
    torch.save(checkpoint, TARGET / "lightning.ckpt")
    torch.save({key: checkpoint[key] for key in ("epoch", "global_step", "loops")}, TARGET / "lightning_meta.pt")

    # DeepSpeed edaa722, deepspeed/runtime/engine.py: _common_checkpoint_state, _save_zero_checkpoint
    torch.save(
        {"module": state["model"], "optimizer": None, "dp_world_size": 2, "mp_world_size": 1, "global_steps": 20},
        TARGET / "deepspeed_model.pt",
    )
    torch.save({"optimizer_state_dict": state["optimizer"], "ds_version": "0.17"}, TARGET / "deepspeed_optim.pt")

    torch.save(TrainingArguments(save_only_model=False), TARGET / "training_args.bin")
    torch.save(TrainingArguments(save_only_model=True), TARGET / "training_args_only_model.bin")


main()
