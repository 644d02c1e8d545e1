"""The training thread makes its batches itself, 40 ms each. Repaired: three workers."""

import time

import torch
from pace import Training, arguments
from torch.utils.data import DataLoader, Dataset


class FromANetwork(Dataset):
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.010)
        return torch.full((8,), float(index % 7))


if __name__ == "__main__":
    args = arguments()
    loader = DataLoader(FromANetwork(), batch_size=4, num_workers=3 if args.repaired else 0)
    Training().run(loader, seconds=args.seconds)
