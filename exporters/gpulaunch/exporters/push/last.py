"""Pushes the final state of a job to a Pushgateway, once, in bounded time.

A Pushgateway keeps pushed metrics until they are deleted, so they must not look like a running job: the series by
which the alert rules recognize one (`gpulaunch_run_info`, `gpulaunch_rank_info`) are left out, and the job is
`gpulaunch_ended`. The grouping key is the run, its node and its name: all of them labels of /metrics too, none of them
an argument, an environment value or a path.
"""

from __future__ import annotations

import threading
import urllib.error
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import push_to_gateway
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from gpulaunch.exporters.prometheus.families import as_utf8
from gpulaunch.exporters.prometheus.values import Facts, families
from gpulaunch.exporters.push.address import LONGEST_S
from gpulaunch.profiler.record import NodeState

JOB: Final = "gpulaunch_ended"
_OF_A_RUNNING_JOB: Final = frozenset({"gpulaunch_run", "gpulaunch_rank"})
"""Family names as in prometheus_client: an info without its suffix."""


class _Last(Collector):
    """The families of a state, except those of a running job."""

    def __init__(self, state: NodeState, version: str) -> None:
        self._state = state
        self._version = version

    def collect(self) -> Iterable[Family]:
        found = families(self._state, Facts(version=self._version)).collect()
        return [family for family in found if family.name not in _OF_A_RUNNING_JOB]


def push(state: NodeState, url: str, *, run: str = "", node: str, version: str, longest_s: float = LONGEST_S) -> str:
    """Push a state, and return why that failed as one line; "" if it did not.

    Blocks for `longest_s` at most: a slow name resolution or a gateway that sends a byte per second is waited for in a
    thread, which is abandoned.

    Args:
        state: the last one.
        url: of the gateway, valid by `address.complaint_about`.
        run: id shared by all nodes of the run; "" for the run's own token.
        node: the host's name.
        version: of gpulaunch.
        longest_s: how long it may take.
    """
    if (group := state.group) is None:
        return "nothing to push: no rank was started"
    key = {"run": as_utf8(run or group.run_id), "instance": as_utf8(node), "name": as_utf8(group.name)}
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Last(state, version))
    place = urlsplit(url).netloc
    outcome: list[str] = []

    def work() -> None:
        try:
            push_to_gateway(url, job=JOB, registry=registry, grouping_key=key, timeout=longest_s)
        except urllib.error.HTTPError as error:
            outcome.append(f"the Pushgateway at {place} answered {error.code} {error.reason}")
        except urllib.error.URLError as error:
            outcome.append(f"cannot reach the Pushgateway at {place}: {_reason(error.reason)}")
        except Exception as error:  # of any kind: it must not disturb the end of a job
            outcome.append(f"cannot push to {place}: {_reason(error)}")
        else:
            outcome.append("")

    thread = threading.Thread(target=work, name="push", daemon=True)
    thread.start()
    thread.join(longest_s)
    return outcome[0] if outcome else f"the Pushgateway at {place} took more than {longest_s:g} s"


def _reason(error: object) -> str:
    said = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
    return said.splitlines()[0][:200] if said.strip() else type(error).__name__
