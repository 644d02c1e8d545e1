"""Authenticates the lines of one connection with a token that both sides have. Pure, but for the nonce.

Each side sends a random challenge. Of the token and both challenges a key for each direction is made, and every line
after them ends with a tab and the HMAC-SHA256 of its number and its text. So a line that is made up, changed, repeated,
reflected, left out or recorded from another connection is not accepted. Lines can be read by anybody on the network,
and torch's store and the ranks' own connections (gloo, NCCL) are not authenticated by this.
"""

from __future__ import annotations

import hashlib
import hmac
import os

from gpulaunch.launcher.job.options import UsageError

MIN_TOKEN_BYTES = 16
_MAX_TOKEN_BYTES = 4096
_MAC_CHARS = 64


class AuthError(Exception):
    """A line is not from somebody with this token; `str()` completes a sentence about the other side."""


class Authenticator:
    """One side of one connection."""

    def __init__(self, token: bytes, *, dialled: bool) -> None:
        """`dialled`: whether this side has made the connection."""
        self.nonce = os.urandom(16).hex()
        self._token = token
        self._dialled = dialled
        self._seal_key = self._open_key = b""
        self._sealed = self._opened = 0

    @property
    def is_ready(self) -> bool:
        """Whether the other side's challenge is known."""
        return bool(self._seal_key)

    def begin(self, nonce: str) -> None:
        """The other side's challenge has come."""
        nonces = (self.nonce, nonce) if self._dialled else (nonce, self.nonce)

        def key(direction: str) -> bytes:
            text = f"gpulaunch {direction} {nonces[0]} {nonces[1]}"
            return hmac.digest(self._token, text.encode(), hashlib.sha256)

        keys = key("from the one that dialled"), key("to the one that dialled")
        self._seal_key, self._open_key = keys if self._dialled else keys[::-1]

    def seal(self, line: bytes) -> bytes:
        """A line, without its newline, with what proves it."""
        mac = _mac(self._seal_key, self._sealed, line)
        self._sealed += 1
        return line + b"\t" + mac

    def open(self, line: bytes) -> bytes:
        """The line that `seal` was given on the other side. Raises AuthError."""
        text, tab, mac = line.rpartition(b"\t")
        if not tab or len(mac) != _MAC_CHARS:
            raise AuthError("gives no token; give --token-file on every node")
        if not hmac.compare_digest(mac, _mac(self._open_key, self._opened, text)):
            raise AuthError("has another token; give the same --token-file on every node")
        self._opened += 1
        return text


def _mac(key: bytes, number: int, line: bytes) -> bytes:
    return hmac.new(key, number.to_bytes(8, "big") + line, hashlib.sha256).hexdigest().encode()


def read_token(path: str) -> bytes | None:
    """The token in a file, without blanks around it; None for the path "". Raises UsageError."""
    if not path:
        return None
    try:
        with open(path, "rb") as file:
            token = file.read(_MAX_TOKEN_BYTES).strip()
    except OSError as err:
        raise UsageError(f"--token-file: cannot read {path}: {err.strerror}") from err
    if len(token) < MIN_TOKEN_BYTES:
        raise UsageError(f"--token-file: {path} has {len(token)} bytes, at least {MIN_TOKEN_BYTES} are needed")
    return token
