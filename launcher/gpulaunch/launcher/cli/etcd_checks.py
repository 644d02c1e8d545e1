"""`gpulaunch doctor --rdzv-backend etcd`: whether this node can use etcd for a job, and if not, what fails."""

from __future__ import annotations

import os
from collections.abc import Iterator

from gpulaunch.launcher.cli.checks import Finding
from gpulaunch.launcher.cli.endpoint_checks import finding
from gpulaunch.launcher.rendezvous.etcd_access import Access
from gpulaunch.launcher.rendezvous.etcd_client import EtcdAwayError, EtcdClient, EtcdError, encoded
from gpulaunch.launcher.rendezvous.listen import format_address

_SAID = {
    "leads": "answers, and has a leader",
    "no leader": "answers, and has no leader",
    "not running": "refuses: etcd does not run there",
    "silent": "does not answer",
}


def members(access: Access) -> Iterator[Finding]:
    """Each endpoint; then whether there is a majority, and whether this node may read and write.

    Raises:
        RendezvousError: certificates that cannot be used.
    """
    client = EtcdClient(access, access.context())
    try:
        standings = client.standings()
        for where, standing in zip(access.endpoints, standings, strict=True):
            version = client.versions.get(where, "")
            value = f"{format_address(*where)} {_SAID[standing]}{f' (etcd {version})' if version else ''}"
            yield finding("OK" if standing == "leads" else "WARN", "member", value)
        yield from _use(client, access, standings)
    finally:
        client.close()


def _use(client: EtcdClient, access: Access, standings: list[str]) -> Iterator[Finding]:
    if "leads" not in standings:
        advice = "more than half of the members must run and reach each other; see --rdzv-endpoint and the firewall"
        yield finding("FAIL", "etcd", "no member with a leader answers: no group can form", advice)
        return
    key = {"key": encoded(f"{access.prefix}/doctor-{os.urandom(8).hex()}")}
    try:
        number = client.num_members()
        client.call("kv/put", {**key, "value": encoded("")})
        client.call("kv/deleterange", key)
    except EtcdAwayError as err:
        yield finding("FAIL", "etcd", f"does not answer a request: {err}", "see etcd's log")
        return
    except EtcdError as err:
        advice = f"check user, password_file and the user's role: it needs all keys below {access.prefix}/"
        yield finding("FAIL", "etcd", f"refuses: {err}", advice)
        return
    if number > len(access.endpoints):
        value = f"has {number} members, of which --rdzv-endpoint lists {len(access.endpoints)}"
        yield finding("WARN", "etcd", value, "list all: the job needs one of those listed")
    elif number < 3:
        value = f"has {number} member{'s' if number > 1 else ''}, and can be read and written"
        yield finding("WARN", "etcd", value, "of three, one may be lost")
    else:
        yield finding("OK", "etcd", f"has {number} members, and can be read and written")
