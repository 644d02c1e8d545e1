"""The agent's checkpoint search: runs in a forked child, and its result arrives on the loop.

A search takes longer the larger the checkpoint, imports what the agent must not (zlib, hashlib, pickletools, fsspec
with its threads), and may block forever on a network file system. A search over a directory of ten small checkpoints
was measured at 6 ms from `start` to the answer, most of it the imports.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from gpulaunch.launcher.checkpoint.find import Checkpoint, Search, Skipped
from gpulaunch.launcher.loop.forked_call import ForkedCall
from gpulaunch.launcher.loop.loop import Loop

COMM = "gpulaunch-find"


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """What to search for: the arguments of `find` and `examine`."""

    where: tuple[str, ...] = ()
    named: str | None = None
    """One named checkpoint to examine, instead of a search: found, or the only skipped one."""
    pattern: str | None = None
    limit: int = 1
    memory: str | None = None
    since_s: float | None = None
    content_s: float = 600.0
    """For how long to read file contents; after that only the structure counts. 0: from the beginning."""
    identify: bool = False
    damaged: tuple[tuple[str, float], ...] = ()
    """(path, save time) of those known to be damaged."""
    share: tuple[int, int] = (0, 1)
    """With `named`: (which, of how many) share of its files to read."""
    is_behind: bool = False
    """Whether it runs while the ranks train: niced, with few threads."""
    timeout_s: float | None = None
    """When to end the search unconditionally. None: some time after `content_s`."""


_STRUCTURE_S = 120.0
"""Additional time to read names, sizes and manifests; after that the storage counts as unreachable."""


class Finder:
    """One search at a time."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._aside = ForkedCall(loop, comm=COMM)

    @property
    def pid(self) -> int | None:
        """The child's pid, while it runs."""
        return self._aside.pid

    def start(self, ask: SearchRequest, done: Callable[[Search], None]) -> None:
        """Search; `done` is called once, from the loop, unless cancelled. A running search is cancelled."""
        timeout_s = ask.content_s + _STRUCTURE_S if ask.timeout_s is None else ask.timeout_s
        try:
            self._aside.ask(
                lambda: json.dumps(asdict(_search(ask))).encode(),
                timeout_s,
                lambda answer, why: done(_understood(answer, why, timeout_s)),
            )
        except OSError as err:
            failed = Search(error=f"cannot start the search for a checkpoint: {os.strerror(err.errno or 0)}")
            self._loop.call_at(self._loop.now(), lambda: done(failed))

    def cancel(self) -> None:
        """End the search, if one is running; its `done` is never called."""
        self._aside.cancel()


def _understood(answer: bytes | None, why: str, timeout_s: float) -> Search:
    """Parse the child's answer; without one, say why."""
    if why == "late":
        return Search(
            error=f"the search for a checkpoint timed out after {timeout_s:.0f} s: is the storage slow or unreachable? "
            "Specify a checkpoint (--resume PATH), start from scratch (--resume never), or increase "
            "--resume-search-timeout"
        )
    if answer is None:
        return Search(error=f"the search for a checkpoint ended with {why} before it had a result")
    document: Any = json.loads(answer)
    return Search(
        found=tuple(Checkpoint(**one) for one in document["found"]),
        skipped=tuple(Skipped(**one) for one in document["skipped"]),
        error=document["error"],
    )


def _search(ask: SearchRequest) -> Search:
    from gpulaunch.launcher.checkpoint import files, find
    from gpulaunch.launcher.checkpoint.damaged import Damaged

    if ask.is_behind:
        os.nice(19)
        files.MAX_THREADS = files.MAX_THREADS_BEHIND
    common: dict[str, Any] = {"memory": ask.memory, "content_s": ask.content_s, "identify": ask.identify}
    try:
        if ask.named is not None:
            return Search(found=(find.examine(ask.named, share=ask.share, **common),))
        wanted: dict[str, Any] = {"pattern": ask.pattern, "limit": ask.limit, "since_s": ask.since_s}
        return find.find(ask.where, damaged=dict(ask.damaged), **wanted, **common)
    except Damaged as why:
        return Search(skipped=(Skipped(path=ask.named or "", format="", why=str(why)),))
    except Exception as err:  # report any error to the agent
        return Search(error=f"the search for a checkpoint failed: {type(err).__name__}: {err}"[:500])
