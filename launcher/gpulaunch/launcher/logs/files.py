"""Log files: a rank's output, byte for byte, and the lines selected by a filter."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence


class LogFile:
    """A file that never raises on write: a failure is reported once, and the loss is noted when writing works again.

    A write may wait for the disk; that cannot be avoided here, and the page cache makes it rare.
    """

    def __init__(self, path: str, *, on_trouble: Callable[[str, OSError], None], append: bool = False) -> None:
        """Create the file for this user only.

        Args:
            path: The file; its directory exists. `/dev/null` keeps nothing.
            on_trouble: Called with the path and the error when writing starts to fail.
            append: Append to an existing file. Otherwise that raises FileExistsError: nothing is overwritten.
        """
        self._path = path
        self._on_trouble = on_trouble
        self._why: OSError | None = None
        self._lost_bytes = 0
        mode = os.O_APPEND if append else os.O_EXCL
        self._fd = None if path == os.devnull else os.open(path, os.O_WRONLY | os.O_CREAT | mode, 0o600)

    def write(self, data: bytes) -> None:
        """Write all of it, or report that it is lost."""
        if self._fd is None:
            return
        try:
            if self._why is not None:
                note = f"\n[gpulaunch: up to {self._lost_bytes} bytes are missing here: {self._why.strerror}]\n"
                _write_all(self._fd, note.encode())
                self._why, self._lost_bytes = None, 0
            _write_all(self._fd, data)
        except OSError as err:
            if self._why is None:
                self._on_trouble(self._path, err)
            self._why = err
            self._lost_bytes += len(data)

    @property
    def fd(self) -> int | None:
        """Its descriptor; None if nothing is kept."""
        return self._fd

    def close(self) -> None:
        """Close the file; later writes are dropped."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _write_all(fd: int, data: bytes) -> None:
    written = os.write(fd, data)
    while written < len(data):
        data = data[written:]
        written = os.write(fd, data)


class FilteredFile:
    """The lines of all ranks that contain any of some words, prefixed: torchrun's `--duplicate-stdout-filters`."""

    def __init__(self, file: LogFile, words: Sequence[str]) -> None:
        self._file = file
        self._words = [os.fsencode(word) for word in words]

    def write(self, prefix: bytes, block: bytes) -> None:
        """Write the selected lines of a block of whole lines."""
        if any(word in block for word in self._words):
            # Also at carriage returns, as torch's own reader of the streams.
            chosen = [prefix + line + b"\n" for line in block.splitlines() if any(word in line for word in self._words)]
            self._file.write(b"".join(chosen))

    def close(self) -> None:
        """Close the file."""
        self._file.close()
