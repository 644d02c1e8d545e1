"""Loads checkpoints as data: tensors, plain values and numpy's, and nothing that would run code.

Otherwise a user who can write to a checkpoint directory could run code as the user who resumes from it. Objects of
other classes, in what an `extra` saves, are loaded only if this run has saved them, or if the program requests it.
The run's id in a manifest can be forged: the file must belong to this user, too.
"""

from __future__ import annotations

import os
import pathlib
import pickle
import re
import stat
import sys
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader

from gpulaunch.checkpoint.messages import CheckpointError

_METADATA = ".metadata"
_NAMED = re.compile(r"(?:GLOBAL|class) ([\w.]+)")
_NAMES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
}
"""Beside its own classes, those that torch 2.6 to 2.14 put into `.metadata`."""


Trust = Callable[[BinaryIO], bool]
"""Whether objects of any class may be loaded from an open file."""


def is_mine(file: BinaryIO) -> bool:
    """Whether an open file belongs to this user, and is not writable by every user."""
    about = os.fstat(file.fileno())
    return about.st_uid == os.geteuid() and not about.st_mode & stat.S_IWOTH


def load(path: str, *, trusts: Trust = lambda _: False) -> dict[str, Any]:
    """Load a file of torch.save; if `trusts` accepts it: objects of any class, as pickled.

    Raises:
        CheckpointError: it holds other than plain values, and is not trusted; the text names what.
        OSError, RuntimeError, EOFError, pickle.UnpicklingError: it cannot be read.
    """
    known = set(torch.serialization.get_safe_globals())  # the program's own, which must stay registered
    safe = torch.serialization.safe_globals([name for name in _numpy() if name not in known])
    with safe, open(path, "rb") as file:
        try:
            content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=not trusts(file))
        except pickle.UnpicklingError as err:
            found = _NAMED.search(str(err))
            if found is None:
                raise
            raise _refused(path, found[1]) from None
    return content


class Reader(FileSystemReader):  # type: ignore[misc] # untyped in torch
    """torch's reader of tensors, which would unpickle anything that `.metadata` names."""

    def __init__(self, directory: str, *, trusts: Trust) -> None:
        super().__init__(directory)
        self._directory = directory
        self._trusts = trusts

    def read_metadata(self, *_args: Any, **_options: Any) -> dcp.Metadata:
        """Like torch's own, but only classes of torch.distributed.checkpoint."""
        path = os.path.join(self._directory, _METADATA)
        with open(path, "rb") as file:
            metadata: dcp.Metadata = pickle.load(file) if self._trusts(file) else _Unpickler(file, path).load()  # noqa: S301
        metadata.storage_meta = stored = getattr(metadata, "storage_meta", None) or dcp.StorageMeta()
        stored.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO, path: str) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        """Allow only the classes of a tensor description."""
        if "." not in name:
            if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
                return getattr(torch, name)
            own = getattr(dcp, name, None) if module == dcp.__name__ else None
            if isinstance(own, type) and own.__module__ == dcp.__name__:
                return own
            if module.partition(".")[0] == "pathlib" and name in ("PosixPath", "PurePosixPath"):
                return getattr(pathlib, name)
            if (module, name) in _NAMES:
                return super().find_class(module, name)
        raise _refused(self._path, f"{module}.{name}")


def _refused(path: str, name: str) -> CheckpointError:
    return CheckpointError(
        f"{os.path.basename(path)} holds {name[:100]}, which is not a plain value; loading it may run code. If you "
        "trust its source: Checkpoint(weights_only=False)"
    )


def _numpy() -> Sequence[Any]:
    """numpy's scalars and arrays, which are plain data, if the program uses numpy."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        try:
            import numpy
        except ImportError:
            return ()
    multiarray = getattr(numpy, "_core", None) or numpy.core
    kinds = {type(numpy.dtype(code)) for code in "?bhilqBHILQefdgFDGSUMm"}
    return (multiarray.multiarray._reconstruct, multiarray.multiarray.scalar, numpy.ndarray, numpy.dtype, *kinds)
