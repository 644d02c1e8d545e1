"""What a file of Prometheus' file_sd says of one node of a run. Pure.

https://prometheus.io/docs/prometheus/latest/configuration/configuration/#file_sd_config: a list of groups, each with
`targets` and `labels`. Labels that begin with two underscores are dropped by Prometheus after relabelling: with those
a later run of ours tells whose file it is, and whether its writer still lives.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

PREFIX: Final = "gpulaunch-"
_VERSION: Final = "1"
_LONGEST: Final = 200
_WILDCARDS: Final = ("0.0.0.0", "::", "")  # noqa: S104 (recognised, not bound)


@dataclass(frozen=True, kw_only=True)
class Target:
    """One node of a run, as Prometheus is to know it."""

    address: str
    """host:port of the page."""
    run: str
    """The same on all nodes of the run, if its user gave it an id; else this node's token."""
    node: str
    """The host's name."""
    name: str
    """What the job is called."""
    token: str
    """This node's own token: what the file is named by."""
    pid: int
    """The agent, which the page ends with."""
    kernel: str
    """Where that pid means something: a boot of a machine, and a pid namespace of it."""
    scheme: str = "http"
    """How the page is asked for: http, or https."""


def address_of(host: str, port: int, node: str) -> str:
    """Where a page that is bound to (host, port) is reached: at the node's name if it is bound to every address."""
    reached = node if host in _WILDCARDS else host
    return f"[{reached}]:{port}" if ":" in reached else f"{reached}:{port}"


def file_name(target: Target) -> str:
    """Name the file. It ends in .json, which is what Prometheus looks for."""
    return f"{PREFIX}{re.sub(r'[^A-Za-z0-9_.-]', '_', target.token)[:_LONGEST]}.json"


def document(target: Target) -> bytes:
    """Write the file's content."""
    labels = {
        # What the scrape job itself says holds where a target says nothing.
        **({"__scheme__": target.scheme} if target.scheme != "http" else {}),
        "run": _clean(target.run),
        "node": _clean(target.node),
        "name": _clean(target.name),
        "__gpulaunch_version": _VERSION,
        "__gpulaunch_pid": str(target.pid),
        "__gpulaunch_kernel": _clean(target.kernel),
    }
    return (json.dumps([{"targets": [target.address], "labels": labels}], indent=2) + "\n").encode("ascii")


def is_left_over(content: bytes, *, kernel: str, alive: Callable[[int], bool]) -> bool:
    """Whether this is a file of ours whose writer is gone.

    Only where its pid can be looked for: not on another machine, after a reboot, or in another container, whatever the
    host's name. What cannot be read is not ours to judge.
    """
    try:
        read: Any = json.loads(content)
        labels = cast("dict[str, Any]", read[0]["labels"])
        if labels["__gpulaunch_version"] != _VERSION or labels["__gpulaunch_kernel"] != _clean(kernel):
            return False
        return bool(kernel) and not alive(int(labels["__gpulaunch_pid"]))
    except (ValueError, LookupError, TypeError, RecursionError):
        return False


def _clean(value: str) -> str:
    """A label's value in valid UTF-8, without control characters, of a length that a person can read."""
    printable = "".join(char if char.isprintable() else "?" for char in value)
    return printable.encode("utf-8", "replace").decode("utf-8")[:_LONGEST]
