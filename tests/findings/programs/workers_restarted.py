"""Every epoch of 64 batches starts its worker anew, which takes a second. Repaired: it stays."""

import time

import torch
from pace import Training, arguments
from torch.utils.data import DataLoader, Dataset


class Remote(Dataset):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), float(index % 7))


def connect(worker: int) -> None:
    time.sleep(1.0)  # what a client of a store in a network takes to begin


if __name__ == "__main__":
    args = arguments()
    loader = DataLoader(Remote(), batch_size=4, num_workers=1, worker_init_fn=connect, persistent_workers=args.repaired)
    Training().run(loader, seconds=args.seconds)
