"""The content of a Prometheus file_sd target file for one node of a run. Pure.

https://prometheus.io/docs/prometheus/latest/configuration/configuration/#file_sd_config: a list of groups, each with
`targets` and `labels`. Prometheus drops labels that begin with two underscores after relabelling: from those a later
run determines whose file it is, and whether its writer is still alive.
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
    """One node of a run, as a Prometheus target."""

    address: str
    """host:port of the endpoint."""
    run: str
    """Shared by all nodes of the run, if the user gave it an id; else this node's token."""
    node: str
    """The host's name."""
    name: str
    """The job's name."""
    token: str
    """This node's own token; the file is named after it."""
    pid: int
    """The agent; the endpoint ends with it."""
    kernel: str
    """Where that pid is valid: a boot of a machine, and one of its pid namespaces."""
    scheme: str = "http"
    """The URL scheme: http or https."""


def address_of(host: str, port: int, node: str) -> str:
    """Return the address of an endpoint bound to (host, port): the node's name if bound to all addresses."""
    reached = node if host in _WILDCARDS else host
    return f"[{reached}]:{port}" if ":" in reached else f"{reached}:{port}"


def file_name(target: Target) -> str:
    """Return the file name. It ends in .json, as Prometheus requires."""
    return f"{PREFIX}{re.sub(r'[^A-Za-z0-9_.-]', '_', target.token)[:_LONGEST]}.json"


def document(target: Target) -> bytes:
    """Return the file's content."""
    labels = {
        # Where a target sets nothing, the setting of the scrape job applies.
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
    """Whether this is a gpulaunch file whose writer is gone.

    True only where its pid can be checked: not on another machine, after a reboot, or in another container, whatever
    the host's name. An unreadable file is never left over.
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
    """Return a label value in valid UTF-8, without control characters, of limited length."""
    printable = "".join(char if char.isprintable() else "?" for char in value)
    return printable.encode("utf-8", "replace").decode("utf-8")[:_LONGEST]
