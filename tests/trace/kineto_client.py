"""A trace client that speaks as torch's does (Kineto's IpcFabricConfigClient). Standard library only."""

from __future__ import annotations

import socket
import struct
import uuid
from pathlib import Path

FREE, BUSY = 3, 1
_HEAD = struct.Struct("=Q32s")


class Client:
    """Asks, and takes the first answer that lies there."""

    def __init__(self, directory: Path, *, bound: bool = True) -> None:
        self.daemon = str(directory / "dynolog")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        if bound:
            self.socket.bind(str(directory / f"dynoconfigclient{uuid.uuid4()}"))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.socket.close()

    def ask(self, kinds: int = FREE, pids: tuple[int, ...] = (1, 2, 3)) -> None:
        """Is there something to trace? `pids`: who it says that it is."""
        self.say(b"req", struct.pack(f"=iiq{len(pids)}i", kinds, len(pids), 0, *pids))

    def say(self, kind: bytes, content: bytes) -> None:
        self.socket.sendto(_HEAD.pack(len(content), kind) + content, self.daemon)

    def answer(self) -> tuple[str, bytes] | None:
        """What kind of answer there is, and its content; None where there is none."""
        try:
            data = self.socket.recv(65536)
        except BlockingIOError:
            return None
        size, kind = _HEAD.unpack_from(data)
        assert size == len(data) - _HEAD.size
        return kind.rstrip(b"\0").decode(), data[_HEAD.size :]
