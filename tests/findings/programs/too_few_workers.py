"""One worker makes a batch in 40 ms, training wants one every 20 ms. Repaired: three workers."""

import time

import torch
from pace import Training, arguments
from torch.utils.data import DataLoader, Dataset


class FromANetwork(Dataset):
    def __init__(self, takes_s: float) -> None:
        self._takes_s = takes_s

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 4 == 0:  # one wait for a batch: each wait ends with one for a core
            time.sleep(self._takes_s)
        return torch.full((8,), float(index % 7))


if __name__ == "__main__":
    args = arguments()
    loader = DataLoader(FromANetwork(0.040 / args.faster), batch_size=4, num_workers=3 if args.repaired else 1)
    Training(compute_s=0.02 / args.faster).run(loader, seconds=args.seconds)
