"""Four workers compute on two cores, and that is not enough. Repaired: there is hardly anything to compute."""

import time

import torch
from pace import Training, arguments
from torch.utils.data import DataLoader, Dataset


class Augmented(Dataset):
    def __init__(self, cpu_s: float) -> None:
        self.cpu_s = cpu_s

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        ends_s = time.thread_time() + self.cpu_s
        while time.thread_time() < ends_s:
            pass
        return torch.full((8,), float(index % 7))


if __name__ == "__main__":
    args = arguments()
    loader = DataLoader(Augmented(0.0005 if args.repaired else 0.025), batch_size=4, num_workers=4)
    Training(compute_s=0.010).run(loader, seconds=args.seconds)
