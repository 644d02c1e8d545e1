"""Twenty-five megabytes are saved every five steps. Repaired: every 400.

A save took 190 ms beside other programs: with every hundredth step the repaired program lost 6 %, and was told so.
"""

import os

import torch
from pace import Training, arguments
from torch import nn

if __name__ == "__main__":
    args = arguments()
    training = Training(model=nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    state = {"ballast": torch.rand(25 << 18), **training.model.state_dict()}
    every = 400 if args.repaired else 5
    path = os.path.join(os.getcwd(), f"checkpoint-{os.getpid()}.pt")

    def save(step: int, loss: torch.Tensor) -> None:
        if step % every == 0:
            torch.save(state, path)

    training.run([torch.rand(4, 8) for _ in range(64)], seconds=args.seconds, after=save)
    os.unlink(path)
