"""Determines node 0, its port and the run id by torchrun's rules for static and single-node rendezvous."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpulaunch.launcher.job.options import UsageError, did_you_mean
from gpulaunch.launcher.job.settings import Settings
from gpulaunch.launcher.job.spec import METRICS_HOST, STATIC_MASTER_PORT

_BACKENDS = ("static", "c10d", "etcd", "etcd-v2")
_WHAT_WORKS = "--nnodes N --node-rank R --master-addr A --master-port P, the same on every node but R"
_DEFAULT_TIMEOUT_S = 900.0


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The nodes of the job and where their ranks meet."""

    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int | None
    run_id: str
    timeout_s: float


def rendezvous(settings: Settings) -> Topology:
    """Decide the topology as torchrun does; reject what is not supported yet instead of running something smaller.

    One node without a port of its own gets a free port, the address localhost and a fresh run id. A port (or an
    endpoint for `static`) makes it static: that address, that port, the given run id.
    """
    backend: str = settings["rdzv-backend"]
    if backend not in _BACKENDS:
        label = settings.label("rdzv-backend")
        raise UsageError(f"{label}: unknown backend {backend!r}{did_you_mean(backend, _BACKENDS)}")
    nnodes = settings.read("nnodes", _nnodes)
    timeout_s = settings.read("rdzv-conf", _timeout_s)
    endpoint: str = settings["rdzv-endpoint"].strip()
    port: int | None = settings["master-port"]
    if port is not None and not 0 <= port < 65536:
        raise UsageError(f"{settings.label('master-port')}: a port is between 0 and 65535, got {port}")

    standalone = settings["standalone"]
    if standalone and nnodes > 1:
        raise UsageError(f"{settings.label('standalone')} is one node, but {settings.label('nnodes')} says {nnodes}")
    fresh = standalone or (backend == "static" and not endpoint and port is None and nnodes == 1)
    if fresh or backend != "static":
        if nnodes > 1:
            raise UsageError(
                f"{settings.label('rdzv-backend')} {backend} with {nnodes} nodes: elastic multi-node is not there yet; "
                f"what works: {_WHAT_WORKS}"
            )
        return Topology(
            nnodes=1,
            node_rank=0,
            master_addr=settings["local-addr"] or "localhost",
            master_port=None,
            run_id=(None if fresh else settings["rdzv-id"]) or _new_id(),
            timeout_s=timeout_s,
        )

    node_rank: int = settings["node-rank"]
    if not 0 <= node_rank < nnodes:
        last = "there is one node, rank 0" if nnodes == 1 else f"{nnodes} nodes have ranks 0 to {nnodes - 1}"
        raise UsageError(f"{settings.label('node-rank')}: {last}, got {node_rank}")
    if endpoint:
        host, port = settings.read("rdzv-endpoint", _endpoint)
        if port is None:
            raise UsageError(f"{settings.label('rdzv-endpoint')}: {endpoint!r} names no port; write HOST:PORT")
    else:
        host = settings["master-addr"].strip().removeprefix("[").removesuffix("]")
        port = STATIC_MASTER_PORT if port is None else port
    if port == 0 and nnodes > 1:
        raise UsageError(f"{settings.label('master-port')}: 0 (any free port) works on one node only; name one")
    return Topology(
        nnodes=nnodes,
        node_rank=node_rank,
        master_addr=host,
        master_port=port or None,
        run_id=settings["rdzv-id"] or _new_id(),
        timeout_s=timeout_s,
    )


def split_address(text: str) -> tuple[str, int | None]:
    """HOST, HOST:PORT, [v6], [v6]:PORT, :PORT -> host (may be empty) and port.

    Raises:
        UsageError: the port is no port, or an IPv6 address lacks its brackets.
    """
    text = text.strip()
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise UsageError(f"expected [ADDRESS]:PORT, got {text!r}")
        port = rest[1:]
        colon = rest[:1]
    elif text.count(":") > 1:
        raise UsageError(f"write an IPv6 address in brackets, such as [::1]:9464, got {text!r}")
    else:
        host, colon, port = text.partition(":")
    if not colon:
        return host, None
    if not (port.isascii() and port.isdecimal() and int(port) < 65536):
        raise UsageError(f"a port is a number between 0 and 65535, got {port!r} in {text!r}")
    return host, int(port)


def metrics_address(text: str) -> tuple[str, int | None]:
    """--metrics-addr; no host means this machine only, no port means the first free one."""
    host, port = split_address(text)
    return host or METRICS_HOST, port


def _endpoint(text: str) -> tuple[str, int | None]:
    """torchrun also takes an IPv6 endpoint without brackets: what follows the last colon is the port."""
    host, _, port = text.strip().rpartition(":")
    return split_address(f"[{host}]:{port}" if ":" in host and not host.startswith("[") else text)


def _nnodes(text: Any) -> int:
    parts = str(text).split(":")
    try:
        numbers = [int(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2):
        raise UsageError(f"expected N (or MIN:MAX), got {text!r}")
    least, most = numbers[0], numbers[-1]
    if not 0 < least <= most:
        raise UsageError(f"a job needs at least 1 node, and MIN at most MAX, got {text!r}")
    if least != most:
        raise UsageError(f"{text}: elastic multi-node (MIN:MAX) is not there yet; what works: {_WHAT_WORKS}")
    return most


def _timeout_s(text: str) -> float:
    for pair in text.split(",") if text.strip() else ():
        key, _, value = (each.strip() for each in pair.partition("="))
        if not key or not value:
            raise UsageError(f"expected KEY=VALUE,KEY=VALUE, got {text!r}")
        if key == "timeout":
            if not value.isdecimal() or int(value) == 0:
                raise UsageError(f"timeout: expected a whole number of seconds, got {value!r}")
            return float(value)
    return _DEFAULT_TIMEOUT_S


def _new_id() -> str:
    import uuid

    return str(uuid.uuid4())
