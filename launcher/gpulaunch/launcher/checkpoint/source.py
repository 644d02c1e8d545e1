"""Where checkpoints are stored: a local directory, or remote storage through fsspec, with one interface.

Every path is relative to the root that was named, with `/` between its parts and "" for the root itself, so a
checkpoint has the same name on every node, wherever the root is mounted.
"""

from __future__ import annotations

import importlib
import os
import stat
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol, cast


class SourceError(Exception):
    """Why a location cannot be searched at all: one sentence with what to do."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One file or directory."""

    path: str
    """Relative to the root."""
    is_dir: bool
    size_bytes: int
    changed_s: float
    """When its content was last written, by the storage's clock; 0.0 if the storage does not report it."""
    mark: str
    """Changes whenever the content may have changed; empty if the storage provides no such value."""

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rpartition("/")[2]


class Source(Protocol):
    """A root and what lies below it. Every method raises OSError, and nothing else, for storage errors."""

    root: str

    def where(self, path: str) -> str:
        """Return the full path or URL, as a user would write it."""
        ...

    def entry(self, path: str) -> Entry | None:
        """Stat one file or directory; None if it does not exist."""
        ...

    def listing(self, path: str, at_most: int) -> list[Entry]:
        """List a directory, in order of name, at most this many entries; without links to directories."""
        ...

    def open(self, path: str) -> BinaryIO:
        """Open a file for reading and seeking."""
        ...


def join(directory: str, name: str) -> str:
    """Join two relative paths, either of which may be empty."""
    return f"{directory}/{name}" if directory and name else directory or name


def is_remote(where: str) -> bool:
    """Whether this names remote storage."""
    return "://" in where


def open_source(where: str) -> Source:
    """Make the source for a directory or URL. Raises SourceError."""
    return Remote(where) if is_remote(where) else Local(where)


class Local:
    """A directory of this host."""

    def __init__(self, root: str) -> None:
        self.root = os.path.abspath(root)

    def where(self, path: str) -> str:
        """Return the absolute path."""
        return os.path.join(self.root, path) if path else self.root

    def entry(self, path: str) -> Entry | None:
        """Stat, following links."""
        try:
            found = os.stat(self.where(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError as err:
            raise OSError(0, str(err)) from None  # a NUL in the name
        return _local_entry(path, found)

    def listing(self, path: str, at_most: int) -> list[Entry]:
        """List; without entries that are neither file nor directory, or that were removed meanwhile."""
        found: list[Entry] = []
        with os.scandir(self.where(path)) as entries:
            for one in entries:
                try:
                    status = one.stat(follow_symlinks=True)
                except OSError:
                    continue
                is_dir = stat.S_ISDIR(status.st_mode)
                # A link to a directory could form a cycle, and its target is found at its own place.
                if is_dir and one.is_symlink():
                    continue
                if is_dir or stat.S_ISREG(status.st_mode):
                    found.append(_local_entry(join(path, one.name), status))
                if len(found) >= at_most:
                    break
        return sorted(found, key=lambda entry: entry.path)

    def open(self, path: str) -> BinaryIO:
        """Open a regular file; anything else is rejected without blocking."""
        descriptor = os.open(self.where(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(0, "not a regular file")
        return os.fdopen(descriptor, "rb")


def _local_entry(path: str, found: os.stat_result) -> Entry:
    return Entry(
        path=path,
        is_dir=stat.S_ISDIR(found.st_mode),
        size_bytes=found.st_size,
        changed_s=found.st_mtime,
        mark=f"{found.st_size}:{found.st_mtime_ns}:{found.st_ctime_ns}:{found.st_dev}:{found.st_ino}",
    )


# The attributes of a file that change with its content: S3, GCS, Azure, and fsspec's own two.
_MARKS = ("ETag", "etag", "generation", "md5Hash", "crc32c", "version_id", "LastModified", "last_modified", "updated")
_MARKS_OF_FSSPEC = ("mtime", "created", "ino")
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "timeModified", "created")


class Remote:
    """Storage that fsspec reaches: `s3://bucket/run`, `gs://`, `abfs://`, `hf://`, `memory://`, `file://`."""

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/")
        protocol = root.partition("://")[0]
        try:
            core = importlib.import_module("fsspec.core")
        except ImportError:
            raise SourceError(f"{root} needs the package fsspec, which is not installed: pip install fsspec") from None
        try:
            self._fs, self._base = cast(tuple[Any, str], core.url_to_fs(root))
            self._fs.invalidate_cache()
        except ImportError as err:
            raise SourceError(f"{root} cannot be reached: fsspec lacks the package for {protocol}:// ({err})") from None
        except Exception as err:  # an unknown protocol, credentials, a malformed URL
            raise SourceError(f"{root} cannot be reached: {_words(err)}") from None
        self._base = self._base.rstrip("/")

    def where(self, path: str) -> str:
        """Return the URL."""
        return f"{self.root}/{path}" if path else self.root

    def entry(self, path: str) -> Entry | None:
        """Query the storage."""
        try:
            return _remote_entry(path, self._fs.info(self._inside(path)))
        except FileNotFoundError:
            return None
        except Exception as err:  # each storage has its own exceptions
            raise OSError(0, _words(err)) from None

    def listing(self, path: str, at_most: int) -> list[Entry]:
        """Query the storage."""
        try:
            answers: list[dict[str, Any]] = self._fs.ls(self._inside(path), detail=True)
        except Exception as err:
            raise OSError(0, _words(err)) from None
        own = self._inside(path).strip("/")
        found: list[Entry] = []
        for answer in answers:
            inside = str(answer.get("name", "")).rstrip("/")
            # Object stores list a placeholder for the directory itself.
            if inside.strip("/") != own:
                found.append(_remote_entry(join(path, inside.rpartition("/")[2]), answer))
        return sorted(found, key=lambda entry: entry.path)[:at_most]

    def open(self, path: str) -> BinaryIO:
        """Open for reading in blocks."""
        try:
            return _Translated(self._fs.open(self._inside(path), "rb"))  # type: ignore[return-value] # what is used of it
        except Exception as err:
            raise OSError(0, _words(err)) from None

    def _inside(self, path: str) -> str:
        return f"{self._base}/{path}" if path else self._base or "/"


class _Translated:
    """A remote file whose every error is an OSError; only the part of the interface that the checks use."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def read(self, size: int = -1) -> bytes:
        try:
            return bytes(self._file.read(size))
        except Exception as err:
            raise OSError(0, _words(err)) from None

    def seek(self, offset: int, whence: int = 0) -> int:
        try:
            return int(self._file.seek(offset, whence))
        except Exception as err:
            raise OSError(0, _words(err)) from None

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> _Translated:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _remote_entry(path: str, answer: dict[str, Any]) -> Entry:
    size = answer.get("size")
    marks = [f"{name}={answer[name]}" for name in (*_MARKS, *_MARKS_OF_FSSPEC) if answer.get(name) is not None]
    return Entry(
        path=path,
        is_dir=answer.get("type") == "directory",
        size_bytes=size if isinstance(size, int) else 0,
        changed_s=next((_seconds(answer[name]) for name in _TIMES if answer.get(name) is not None), 0.0),
        mark=f"{size}:{':'.join(marks)}" if marks else "",
    )


def _seconds(time: Any) -> float:
    """Parse a number, a datetime or ISO text, which is what storages return."""
    from datetime import UTC, datetime

    if isinstance(time, str):
        try:
            time = datetime.fromisoformat(time)
        except ValueError:
            return 0.0
    if isinstance(time, datetime):
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    return float(time) if isinstance(time, (int, float)) else 0.0


def _words(err: BaseException) -> str:
    """One line for an exception of any storage."""
    return (f"{type(err).__name__}: {err}" if str(err) else type(err).__name__).splitlines()[0][:200]
