"""Every sixteenth batch takes half a second, and those behind it wait for it. Repaired: in_order=False."""

import time

import torch
from pace import Training, arguments
from torch.utils.data import DataLoader, Dataset


class Uneven(Dataset):
    def __len__(self) -> int:
        return 400_000

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 64 == 0:
            time.sleep(0.5)
        return torch.full((8,), float(index % 7))


if __name__ == "__main__":
    args = arguments()
    loader = DataLoader(Uneven(), batch_size=4, num_workers=4, in_order=not args.repaired)
    Training(compute_s=0.010).run(loader, seconds=args.seconds)
