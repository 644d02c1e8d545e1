"""Every step is logged, and every line waits for the disk. Repaired: every thousandth step."""

import logging
import time

import torch
from pace import Training, arguments

logger = logging.getLogger("training")


class ToASlowDisk(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        time.sleep(0.200)  # what a write with fsync takes on a busy file system of a network


if __name__ == "__main__":
    args = arguments()
    logger.setLevel(logging.INFO)
    logger.addHandler(ToASlowDisk())
    every = 1000 if args.repaired else 1

    def log(step: int, loss: torch.Tensor) -> None:
        if step % every == 0:
            logger.info("step %d: loss %f", step, loss.item())

    Training().run([torch.rand(4, 8) for _ in range(64)], seconds=args.seconds, after=log)
