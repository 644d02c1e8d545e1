"""Creates the rendezvous of a job: on one node, of a fixed number of nodes, or of a group that may change."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from gpulaunch.launcher.job.spec import STATIC_MASTER_PORT, Etcd, JobSpec
from gpulaunch.launcher.loop.loop import Loop
from gpulaunch.launcher.policy.restart import Limits
from gpulaunch.launcher.rendezvous.base import Rendezvous
from gpulaunch.launcher.rendezvous.etcd_access import Access, read_password
from gpulaunch.launcher.rendezvous.listen import is_loopback
from gpulaunch.launcher.rendezvous.local import LocalRendezvous


def rendezvous_of(loop: Loop, spec: JobSpec, say: Callable[[str], None]) -> Rendezvous:
    """The one that `spec` asks for.

    Raises:
        RendezvousError: this node cannot listen where it should.
        UsageError: the token cannot be read.
    """
    limits = Limits(
        max_restarts=spec.max_restarts,
        rate=spec.restart_rate,
        backoff_max_s=spec.restart_backoff_s,
        no_progress=spec.no_progress_limit,
    )
    if spec.nnodes == 1:
        return LocalRendezvous(
            loop, nproc=spec.nproc, master_addr=spec.master_addr, master_port=spec.master_port, limits=limits
        )
    elastic = spec.elastic
    warned_elsewhere = elastic is not None and elastic.leads is False
    if elastic is not None and elastic.etcd is not None:
        etcd = elastic.etcd
        if not (etcd.cert or etcd.user or spec.insecure or is_loopback(spec.master_addr)):
            say(
                "WARNING: anyone who can connect to etcd can join this job, or end it; give etcd users or certificates "
                "(docs/many-nodes.md), or say that the network is trusted: --insecure"
            )
    elif not (spec.token_file or spec.insecure or is_loopback(spec.master_addr) or warned_elsewhere):
        say(
            f"WARNING: anyone who can connect to {spec.master_addr}:{spec.master_port} can join this job, or end it; "
            "use the same --token-file on every node, or --insecure if the network is trusted"
        )
    return _group(loop, spec, limits, say)


def _group(loop: Loop, spec: JobSpec, limits: Limits, say: Callable[[str], None]) -> Rendezvous:
    from gpulaunch.launcher.rendezvous.auth import read_token
    from gpulaunch.launcher.rendezvous.group import GroupRendezvous
    from gpulaunch.launcher.rendezvous.plan import Settings

    group = partial(
        GroupRendezvous,
        loop,
        run_id=spec.run_id,
        nproc=spec.nproc,
        addr=spec.master_addr,
        token=read_token(spec.token_file),
    )
    elastic = spec.elastic
    if elastic is None:
        settings = Settings.of_fixed(spec.nnodes, limits, join_timeout_s=spec.rdzv_timeout_s, replicate=spec.replicate)
        rendezvous = group(settings=settings, order=spec.node_rank, port=spec.master_port or STATIC_MASTER_PORT)
    else:
        settings = Settings(
            min_nodes=elastic.min_nodes,
            max_nodes=elastic.max_nodes,
            limits=limits,
            join_timeout_s=elastic.join_timeout_s,
            last_call_s=elastic.last_call_s,
            away_s=elastic.away_s,
            replicate=spec.replicate,
        )
        rendezvous = group(
            settings=settings,
            order=elastic.order,
            port=spec.master_port or 0,
            leads=elastic.leads,
            etcd=access_of(elastic.etcd) if elastic.etcd is not None else None,
        )
    rendezvous.on_note = say
    return rendezvous


def access_of(etcd: Etcd) -> Access:
    """With the password read from its file. Raises RendezvousError."""
    return Access(
        endpoints=etcd.endpoints,
        tls=etcd.tls,
        cacert=etcd.cacert,
        cert=etcd.cert,
        key=etcd.key,
        user=etcd.user,
        password=read_password(etcd.password_file),
        prefix=etcd.prefix,
    )
