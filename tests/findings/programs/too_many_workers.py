"""A batch is a list of 150 tensors, and each of them is sent on its own. Repaired: no workers."""

import torch
from pace import Training, arguments
from torch.utils.data import DataLoader, Dataset


class InMemory(Dataset):
    def __init__(self) -> None:
        self.rows = torch.rand(4096, 8)

    def __len__(self) -> int:
        return 400_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index % 4096].clone()


def as_a_list(samples: list[torch.Tensor]) -> list[torch.Tensor]:
    return samples


class Stacked(Training):
    def step(self, x) -> torch.Tensor:
        return super().step(torch.stack(x))


if __name__ == "__main__":
    args = arguments()
    workers = 0 if args.repaired else 2
    loader = DataLoader(InMemory(), batch_size=150, num_workers=workers, collate_fn=as_a_list)
    Stacked(compute_s=0.005).run(loader, seconds=args.seconds)
