"""Garbage is collected at every step, among a million objects. Repaired: they are frozen first."""

import gc

import torch
from pace import Training, arguments

if __name__ == "__main__":
    args = arguments()
    vocabulary = [{"word": str(index)} for index in range(200_000)]
    if args.repaired:
        gc.collect()
        gc.freeze()

    def collect(step: int, loss: torch.Tensor) -> None:
        gc.collect()

    Training().run([torch.rand(4, 8) for _ in range(64)], seconds=args.seconds, after=collect)
    assert len(vocabulary) == 200_000
