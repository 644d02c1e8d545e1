"""A list keeps something of every step. Repaired: it keeps a number; what it reads is a file, and grows in memory, too.

The pages of the file are the page cache's, so the resident memory of both grows alike, and only one's is a loss.
"""

import os

import torch
from pace import Training, arguments

EACH_STEP = 1 << 16  # floats: a quarter of a megabyte
STEPS = 4096

if __name__ == "__main__":
    args = arguments()
    kept: list[torch.Tensor | float] = []
    path = os.path.join(os.getcwd(), f"samples-{os.getpid()}.bin")
    with open(path, "wb") as file:
        file.truncate(4 * EACH_STEP * STEPS)  # a hole: nothing of it is on the disk
    samples = torch.from_file(path, shared=False, size=EACH_STEP * STEPS)
    os.unlink(path)

    def keep(step: int, loss: torch.Tensor) -> None:
        if args.repaired:
            kept.append(loss.item() + samples[EACH_STEP * step : EACH_STEP * (step + 1)].sum().item())
        else:
            kept.append(loss.detach().expand(EACH_STEP).clone())

    Training().run([torch.rand(4, 8) for _ in range(64)], seconds=args.seconds, after=keep)
    with open("/proc/self/statm") as statm:
        _, resident, shared, *_ = map(int, statm.read().split())
    print(f"resident {resident} shared {shared}", flush=True)
