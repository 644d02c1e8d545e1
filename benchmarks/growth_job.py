"""The job of benchmarks/growth.py: many short steps, and how much memory the rank has in use now and then.

It looks at the end of each epoch, when no batch is under way, and first has Python collect garbage and torch forget the
batches that are gone, which it does only now and then: what is counted is what is held. The looks are kept in an array
that is there from the beginning.
"""

from __future__ import annotations

import argparse
import array
import ctypes
import gc
import json
import os
import sys
import time
from pathlib import Path

import torch
from _shape import BATCH, EPOCH_STEPS, METERS
from overhead_job import Ready
from torch.multiprocessing import reductions
from torch.utils.data import DataLoader, default_convert

_FIELDS = ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]


class _Mallinfo2(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


_mallinfo2 = ctypes.CDLL(None).mallinfo2
_mallinfo2.restype = _Mallinfo2


def look(seen: array.array[int], at: int) -> None:
    """Blocks of Python's allocator; bytes that malloc has given out; resident bytes."""
    reductions.shared_cache.free_dead_references()
    gc.collect()
    with open("/proc/self/statm", "rb") as statm:
        resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    heap = _mallinfo2()
    seen[at : at + 3] = array.array("q", (sys.getallocatedblocks(), heap.uordblks + heap.hblkhd, resident))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("notes", type=Path)
    parser.add_argument("stop", type=Path)
    parser.add_argument("--epochs", type=int, required=True)
    options = parser.parse_args()

    torch.manual_seed(0)
    loader = DataLoader(Ready(), batch_size=BATCH, num_workers=1, persistent_workers=True, collate_fn=default_convert)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss_of = torch.nn.CrossEntropyLoss()

    seen = array.array("q", bytes(8 * len(METERS) * options.epochs))
    for epoch in range(options.epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = loss_of(model(inputs), targets)
            loss.backward()
            optimizer.step()
        look(seen, epoch * len(METERS))
    told = {
        "channel_dir": os.environ.get("GPULAUNCH_CHANNEL_DIR", ""),
        "steps": options.epochs * EPOCH_STEPS,
        **{meter: list(seen[index :: len(METERS)]) for index, meter in enumerate(METERS)},
    }
    with open(options.notes, "a") as notes:
        notes.write(json.dumps(told) + "\n")
    while not options.stop.exists() and os.getppid() != 1:
        time.sleep(0.05)


if __name__ == "__main__":
    main()
