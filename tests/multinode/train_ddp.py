"""DDP over gloo with checkpoints: writes its steps as `stand_in_rank` does, and when it resumed."""

from __future__ import annotations

import json
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gpulaunch.checkpoint import Checkpoint

STEPS = os.environ["STEPS"] + f".{os.environ['LOCAL_RANK']}"


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ckpt = Checkpoint(model=model, optimizer=optimizer, every=10)
    resumed = ckpt.resume() or 0
    with open(STEPS, "a", encoding="ascii") as out:
        for step in ckpt.steps(100_000):
            ends = torch.tensor(float(os.path.exists(STEPS + ".do")))
            dist.all_reduce(ends)
            loss = model(torch.full((4, 8), float(step % 7 + dist.get_rank()))).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            facts = {
                "at_s": time.monotonic(),
                "step": step,
                "resumed": resumed,
                "rank": dist.get_rank(),
                "world_size": dist.get_world_size(),
                "node_rank": int(os.environ["GROUP_RANK"]),
                "attempt": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
                "store": os.environ["MASTER_ADDR"],
                "pid": os.getpid(),
            }
            out.write(json.dumps(facts) + "\n")
            out.flush()
            ckpt.step()
            if ends:
                break
            time.sleep(0.02)
    ckpt.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
