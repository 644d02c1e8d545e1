"""Determines where the nodes of a job meet, and how many there are, by torchrun's rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gpulaunch.launcher.job import slurm
from gpulaunch.launcher.job.options import UsageError, did_you_mean
from gpulaunch.launcher.job.settings import Settings
from gpulaunch.launcher.job.spec import METRICS_HOST, STATIC_MASTER_PORT, Elastic, Etcd

_BACKENDS = ("static", "leader", "c10d", "etcd", "etcd-v2")
_LEADER = ("leader", "c10d")
"""Two names of one: c10d is torchrun's."""
ETCD_BACKENDS = ("etcd", "etcd-v2")
"""Two names of one: torchrun has two clients."""
_WHAT_WORKS = "--rdzv-backend leader --rdzv-endpoint HOST:PORT, the same on every node"
ELASTIC_PORT = 29400
"""torchrun's, where --rdzv-endpoint names no port."""
ETCD_PORT = 2379


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The nodes of the job and where their ranks meet."""

    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int | None
    run_id: str
    timeout_s: float
    elastic: Elastic | None = None


def rendezvous(settings: Settings, task: slurm.Task | None = None) -> Topology:
    """Decide the topology as torchrun does; reject what is not supported yet instead of running something smaller.

    One node without a port of its own gets a free port, the address localhost and a fresh run id. Several nodes with
    an endpoint are elastic: they meet there, and may come and go. A port (or an endpoint for `static`) makes it static:
    that address, that port, the given run id. `task`: this launcher is one of several tasks of Slurm, whose nodes the
    user has not named: they are one job.
    """
    backend: str = settings["rdzv-backend"]
    if backend not in _BACKENDS:
        label = settings.label("rdzv-backend")
        raise UsageError(f"{label}: unknown backend {backend!r}{did_you_mean(backend, _BACKENDS)}")
    least, nnodes = num_nodes(settings)
    conf = settings.read("rdzv-conf", _conf)
    timeout_s = conf["timeout"]
    endpoint: str = settings["rdzv-endpoint"].strip()
    port: int | None = settings["master-port"]
    if port is not None and not 0 <= port < 65536:
        raise UsageError(f"{settings.label('master-port')}: a port is between 0 and 65535, got {port}")

    if task is not None:
        return _of_slurm(settings, task, conf)
    standalone = settings["standalone"]
    if standalone and nnodes > 1:
        raise UsageError(f"{settings.label('standalone')} is one node, but {settings.label('nnodes')} is {nnodes}")
    fresh = standalone or (backend == "static" and not endpoint and port is None and nnodes == 1)
    is_given = settings.origins["rdzv-backend"] != "default"
    if nnodes > 1 and (backend in (*_LEADER, *ETCD_BACKENDS) or (not is_given and endpoint)):
        return _elastic(settings, least, nnodes, conf)
    if fresh or backend != "static":
        return Topology(
            nnodes=1,
            node_rank=0,
            master_addr=settings["local-addr"] or "localhost",
            master_port=None,
            run_id=(None if fresh else settings["rdzv-id"]) or _new_id(),
            timeout_s=timeout_s,
        )
    if least < nnodes:
        raise UsageError(f"{settings.label('nnodes')}: {least}:{nnodes} nodes need {_WHAT_WORKS}")

    node_rank: int = settings["node-rank"]
    if not 0 <= node_rank < nnodes:
        last = "there is one node, rank 0" if nnodes == 1 else f"{nnodes} nodes have ranks 0 to {nnodes - 1}"
        raise UsageError(f"{settings.label('node-rank')}: {last}, got {node_rank}")
    if endpoint:
        host, port = settings.read("rdzv-endpoint", endpoint_of)
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


def _elastic(settings: Settings, least: int, most: int, conf: Mapping[str, float]) -> Topology:
    backend: str = settings["rdzv-backend"]
    if not settings["rdzv-endpoint"].strip():
        works = _WHAT_WORKS if backend not in ETCD_BACKENDS else "--rdzv-endpoint HOST:PORT,HOST:PORT, members of etcd"
        raise UsageError(f"{settings.label('rdzv-backend')}: {most} nodes need a place to meet: {works}")
    etcd = _etcd(settings) if backend in ETCD_BACKENDS else None
    host, port = etcd.endpoints[0] if etcd is not None else settings.read("rdzv-endpoint", endpoint_of)
    if port == 0:
        raise UsageError(f"{settings.label('rdzv-endpoint')}: the other nodes cannot find any free port (0); name one")
    order: int | None = settings["node-rank"] if settings.origins["node-rank"] != "default" else None
    if order is not None and order < 0:
        raise UsageError(f"{settings.label('node-rank')}: counts from 0, got {order}")
    return Topology(
        nnodes=most,
        node_rank=order or 0,
        master_addr=host,
        master_port=port or ELASTIC_PORT,
        run_id=settings["rdzv-id"] or _new_id(),
        timeout_s=conf["timeout"],
        elastic=replace(_group(least, most, conf, order=order), etcd=etcd),
    )


def _of_slurm(settings: Settings, task: slurm.Task, conf: Mapping[str, float]) -> Topology:
    """Every task is a node of one group; they meet on the first host of the step."""
    origin = f"detected: Slurm step {task.name}"
    least = most = task.num_tasks
    if settings.origins["nnodes"] == "default":
        settings.settle("nnodes", most, origin)
    else:
        least, most = num_nodes(settings)
        if most > task.num_tasks:
            raise UsageError(f"{settings.label('nnodes')}: {most} nodes, but srun starts {task.num_tasks} tasks")
        if least < task.num_tasks and not task.one_per_host:
            raise UsageError(
                f"{settings.label('nnodes')}: fewer nodes than tasks need one task for each node "
                "(srun --ntasks-per-node=1)"
            )
    host, port = task.meeting_host, task.meeting_port
    if settings.origins["master-addr"] != "default":
        host = settings["master-addr"].strip().removeprefix("[").removesuffix("]")
    if settings.origins["rdzv-id"] == "default":
        settings.settle("rdzv-id", task.name, origin)
    settings.settle("node-rank", task.rank, origin)
    return Topology(
        nnodes=most,
        node_rank=task.rank,
        master_addr=settings.settle("master-addr", host, _kept(settings, "master-addr", origin)),
        master_port=settings.settle(
            "master-port", settings["master-port"] or port, _kept(settings, "master-port", origin)
        ),
        run_id=settings["rdzv-id"],
        timeout_s=conf["timeout"],
        elastic=_group(least, most, conf, order=task.rank, leads=task.leads),
    )


def _group(
    least: int, most: int, conf: Mapping[str, float], *, order: int | None, leads: bool | None = None
) -> Elastic:
    return Elastic(
        min_nodes=least,
        max_nodes=most,
        order=order,
        leads=leads,
        join_timeout_s=conf["join_timeout"],
        last_call_s=conf["last_call_timeout"],
        away_s=conf["away_timeout"],
    )


def _kept(settings: Settings, name: str, origin: str) -> str:
    return origin if settings.origins[name] == "default" else settings.origins[name]


def num_nodes(settings: Settings) -> tuple[int, int]:
    """--nnodes: the least and the most."""
    return settings.read("nnodes", _nnodes)


def _etcd(settings: Settings) -> Etcd:
    if settings["token-file"]:
        raise UsageError(
            f"{settings.label('token-file')}: etcd lets the nodes in by itself; see --rdzv-conf user, password_file, "
            "cert and key"
        )
    if settings["rdzv-id"] in ("", "none"):
        raise UsageError(f"{settings.label('rdzv-id')}: the jobs in etcd are told apart by it; give each another")
    return Etcd(endpoints=settings.read("rdzv-endpoint", etcd_endpoints), **settings.read("rdzv-conf", etcd_conf))


def etcd_endpoints(text: str) -> tuple[tuple[str, int], ...]:
    """HOST:PORT,HOST:PORT: the members of a cluster; a port that is not given is etcd's."""
    found: list[tuple[str, int]] = []
    for each in text.split(","):
        host, port = endpoint_of(each)
        if not host or port == 0:
            raise UsageError(f"expected HOST:PORT,HOST:PORT, got {text!r}")
        found.append((host, port or ETCD_PORT))
    return tuple(dict.fromkeys(found))


def etcd_conf(text: str) -> dict[str, Any]:
    """Of --rdzv-conf, what etcd needs, by the names of both of torchrun's clients."""
    given = _pairs(text)
    if "password" in given:
        raise UsageError("password: everybody on this machine can see it here; write it to a file: password_file=FILE")
    protocol = given.get("protocol", "http")
    if protocol not in ("http", "https"):
        raise UsageError(f"protocol: expected http or https, got {protocol!r}")
    files = {
        "cacert": given.get("cacert") or given.get("ca_cert", ""),
        "cert": given.get("cert") or given.get("ssl_cert", ""),
        "key": given.get("key") or given.get("ssl_cert_key", ""),
    }
    for name, path in files.items():
        if path and protocol == "http":
            raise UsageError(f"{name}: a certificate is used with protocol=https only")
    if bool(given.get("user")) != bool(given.get("password_file")):
        raise UsageError("user and password_file: one needs the other")
    return {
        **files,
        "tls": protocol == "https",
        "user": given.get("user", ""),
        "password_file": given.get("password_file", ""),
        "prefix": given.get("etcd_prefix", "/gpulaunch"),
    }


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


def endpoint_of(text: str) -> tuple[str, int | None]:
    """torchrun also takes an IPv6 endpoint without brackets: what follows the last colon is the port."""
    host, _, port = text.strip().rpartition(":")
    return split_address(f"[{host}]:{port}" if ":" in host and not host.startswith("[") else text)


def _nnodes(text: Any) -> tuple[int, int]:
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
    return least, most


def _conf(text: str) -> dict[str, float]:
    """Of --rdzv-conf, the times in seconds that are used; other keys are ignored.

    The defaults are torchrun's; `away_timeout`, how long nodes wait for a leader that they have lost, is ours.
    """
    times_s = {"timeout": 900.0, "join_timeout": 600.0, "last_call_timeout": 30.0, "away_timeout": 60.0}
    for key, value in _pairs(text).items():
        if key in times_s:
            if not value.isdecimal() or (int(value) == 0 and key != "last_call_timeout"):
                raise UsageError(f"{key}: expected a whole number of seconds, got {value!r}")
            times_s[key] = float(value)
    return times_s


def _pairs(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in text.split(",") if text.strip() else ():
        key, _, value = (each.strip() for each in pair.partition("="))
        if not key or not value:
            raise UsageError(f"expected KEY=VALUE,KEY=VALUE, got {text!r}")
        found[key] = value
    return found


def _new_id() -> str:
    import uuid

    return str(uuid.uuid4())
