"""The whole history is written at every step. Repaired: every thousandth step."""

import json

import torch
from pace import Training, arguments

if __name__ == "__main__":
    args = arguments()
    every = 1000 if args.repaired else 1
    history = [{"step": step, "loss": step / 7} for step in range(15_000)]

    def keep(step: int, loss: torch.Tensor) -> None:
        history[step % len(history)] = {"step": step, "loss": loss.item()}
        if step % every == 0:
            with open("/dev/null", "w") as file:
                json.dump(history, file)

    Training().run([torch.rand(4, 8) for _ in range(64)], seconds=args.seconds, after=keep)
