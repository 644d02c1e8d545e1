"""Every sample is gathered from the device, past the page cache, piece by piece. Repaired: the file is in memory."""

import mmap
import os

import torch
from pace import Training, arguments
from torch.utils.data import DataLoader, Dataset

PIECE_BYTES = 16384
PIECES_OF_A_SAMPLE = 150
PIECES = 4096


class OnDisk(Dataset):
    def __init__(self, path: str, *, direct: bool) -> None:
        self.path = path
        self.flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        total = 0
        fd = os.open(self.path, self.flags)
        with mmap.mmap(-1, PIECE_BYTES) as aligned:  # O_DIRECT wants whole pages
            for piece in range(PIECES_OF_A_SAMPLE):
                os.preadv(fd, [aligned], (index + 37 * piece) % PIECES * PIECE_BYTES)
                total += aligned[0]
        os.close(fd)
        return torch.full((8,), float(total))


if __name__ == "__main__":
    args = arguments()
    path = os.path.join(os.getcwd(), f"samples-{os.getpid()}.bin")
    with open(path, "wb") as file:
        for _ in range(PIECES):
            file.write(os.urandom(PIECE_BYTES))
        file.flush()
        os.fsync(file.fileno())
    loader = DataLoader(OnDisk(path, direct=not args.repaired), batch_size=4, num_workers=2)
    Training(compute_s=0.005).run(loader, seconds=args.seconds)
    os.unlink(path)
