"""A job's keys in etcd, as one node reads and writes them; blocking, for a thread of its own.

    <prefix>/<run id>/job           what all nodes must agree on, and the lease of the plan
    <prefix>/<run id>/decider       the node that decides, under that node's lease
    <prefix>/<run id>/head          the plan without its seats
    <prefix>/<run id>/seats/<00>    some of its seats; a node reads the key that has its own
    <prefix>/<run id>/reports/<id>  what a node says of itself, under its lease; written when it changes
    <prefix>/<run id>/beats/<id>    written each second, under its lease: its revision is the heartbeat's number

A turn is one transaction: it writes this node's beat and reads what is new to it. The beat of a turn that is answered
has been written after the turn began. The plan is written only by the decider that etcd names at that moment, and only
over the plan that it has read. Leases only remove what is left of nodes and jobs that are gone. They stretch when the
leader of etcd changes, so no decision is taken by them.
"""

from __future__ import annotations

import contextlib
import json
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpulaunch.launcher.rendezvous.admission import mismatch
from gpulaunch.launcher.rendezvous.codec import MessageError, clean, from_plain, to_plain
from gpulaunch.launcher.rendezvous.etcd_client import NOT_FOUND, EtcdClient, EtcdError, decoded, encoded, under
from gpulaunch.launcher.rendezvous.messages import VERSION, Register
from gpulaunch.launcher.rendezvous.plan import Plan, Report, Seat, Stage

LEASE_S = 30
"""Longer than any silence after which a node is lost."""
_SHARDS = 64
"""Keys with seats, at most: etcd takes 128 operations in a transaction, and each node reads one of them."""


class RefusedError(Exception):
    """This node cannot take part; `str()` is one line for the user."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What a node has to say, and what it wants to know."""

    report: Report | None = None
    """None: it has not changed."""
    takes: bool = False
    """To be the decider, if the one that was read last still is."""
    decides: bool = False
    """To be told the reports and beats of all nodes."""
    plan: Plan | None = None
    """To be written by the decider."""
    clears: bool = False
    """To remove what is left of a job that is over."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """The answer to a turn."""

    sent_s: float
    """The beat has been written after this time."""
    plan: Plan | None = None
    """None: unchanged, or there is none. With the node's own seat, or all for the decider."""
    written_s: float = 0.0
    """The time by the clock of who wrote it, when that was."""
    has_plan: bool = False
    decider: str = ""
    decider_beat: int = 0
    """0: not known."""
    beats: Mapping[str, int] | None = None
    """Of all nodes."""
    reports: Sequence[tuple[Report, bool]] = ()
    """Those that have changed, and whether the node has left."""
    wrote: bool = False
    local_addr: str = ""


@dataclass
class _Known:
    """What was read last, by revision; forgotten when a job's keys were removed."""

    job: int = 0
    head: int = 0
    seats: int = 0
    report: int = 0
    reports: int = 0
    decider: str = ""
    decider_revision: int = 0
    plan: Plan | None = None
    written_s: float = 0.0
    own_seat: tuple[int, Seat | None] = (0, None)
    all_seats: dict[str, tuple[int, tuple[Seat, ...]]] = field(default_factory=dict[str, tuple[int, tuple[Seat, ...]]])
    decides: bool = False


class EtcdSession:
    """One node's side of a job's keys."""

    def __init__(self, client: EtcdClient, prefix: str, register: Register, node: str) -> None:
        """`node`: the identity of this agent."""
        self._client = client
        self._register = register
        self._node = node
        self._base = f"{prefix.rstrip('/')}/{register.run_id}/"
        self._lease = self._job_lease = ""
        self._kept_s = 0.0
        self._known = _Known()
        self._report: Report | None = None
        self._report_s = 0.0
        self._is_written = True
        self._has_begun = False

    @property
    def watched(self) -> list[dict[str, str]]:
        """The keys whose change concerns this node."""
        ranges = [{"key": self._key("head")}, {"key": self._key("decider")}]
        return [*ranges, under(self._base + "reports/")] if self._decides else ranges

    @property
    def _decides(self) -> bool:
        return self._known.decider == self._node

    # -- a turn

    def turn(self, ask: Ask) -> Told:
        """Say and hear what is new. Raises EtcdError and RefusedError."""
        if ask.report is not None:
            self._report, self._report_s, self._is_written = ask.report, time.monotonic(), False
        if not self._has_begun:
            self._client.learn_members()
            self._has_begun = True
        if not self._job_lease:
            self._enter()
        if ask.clears:
            self._remove_job()
            self._enter()
        self._keep_leases()
        wrote = ask.plan is not None and self._decides and self._write(ask.plan)
        if ask.takes:
            self._take()
        try:
            told = self._sync(ask.decides)
        except EtcdError as err:
            if err.code == NOT_FOUND:  # the lease has run out
                self._lease, self._is_written = "", False
                self._known.report = 0
            raise
        return replace(told, wrote=wrote)

    def leave(self, *, over: bool) -> None:
        """This node's ranks are dead, and its agent ends; `over`: as the plan says."""
        if not self._lease:
            return
        body = {"success": [_delete(self._key(f"beats/{self._node}"))]}
        if self._report is not None and not over:
            body["success"].append(self._put_report(gone=True))
        elif over:
            body["success"].append(_delete(self._key(f"reports/{self._node}")))
        body["success"].append({"request_range": {**under(self._base + "beats/"), "count_only": True}})
        responses = self._client.call("kv/txn", body)["responses"]
        if self._decides:
            compare = [_compare(self._key("decider"), "MOD", self._known.decider_revision)]
            self._client.call("kv/txn", {"compare": compare, "success": [_delete(self._key("decider"))]})
        if int(responses[-1]["response_range"].get("count", "0")) == 0:
            self._remove_job()

    def _sync(self, decides: bool) -> Told:
        known = self._known
        fresh = decides and not known.decides
        own_seats = self._key(f"seats/{_shard(self._node)}")
        common: dict[str, dict[str, Any]] = {
            "beat": _put(self._key(f"beats/{self._node}"), "", self._lease),
            "job": _range({"key": self._key("job")}, keys_only=True),
            "head": _range({"key": self._key("head")}, after=0 if fresh else known.head),
            "seats": _range(
                under(self._base + "seats/") if decides else {"key": own_seats},
                after=0 if fresh else known.seats,
            ),
            "decider": _range({"key": self._key("decider")}),
            "decider_beat": _range({"key": self._key(f"beats/{known.decider or '-'}")}, keys_only=True),
        }
        if decides:
            common["beats"] = _range(under(self._base + "beats/"), keys_only=True)
            common["reports"] = _range(under(self._base + "reports/"), after=0 if fresh else known.reports)
        own = self._key(f"reports/{self._node}")
        body: dict[str, Any] = {"success": list(common.values())}
        if not self._is_written:
            body["compare"] = [_compare(own, "MOD", known.report)]
            body["failure"] = [_range({"key": own}, keys_only=True), *common.values()]
            body["success"] = [self._put_report(gone=False), *common.values()]
        sent_s = time.monotonic()
        answer = self._client.call("kv/txn", body)
        responses = answer["responses"]
        revision = int(answer["header"]["revision"])
        if not self._is_written:
            if answer.get("succeeded"):
                known.report, self._is_written = revision, True
            else:  # written by a request of this node's that was given up, or removed with its lease
                kvs = responses[0]["response_range"].get("kvs", ())
                known.report = int(kvs[0]["mod_revision"]) if kvs else 0
            responses = responses[1:]
        ranges = {name: each.get("response_range", {}) for name, each in zip(common, responses, strict=True)}
        known.decides = decides
        return self._read(ranges, revision, sent_s, decides)

    def _read(self, ranges: Mapping[str, Any], revision: int, sent_s: float, decides: bool) -> Told:
        known = self._known
        job = ranges["job"].get("kvs", ())
        if not job or int(job[0]["create_revision"]) != known.job:  # removed, or begun anew by others
            self._known, self._job_lease, self._is_written = _Known(report=known.report), "", False
            return Told(sent_s=sent_s, local_addr=self._client.local_addr())
        asked_for, known.decider, known.decider_revision = known.decider, "", 0
        for each in ranges["decider"].get("kvs", ()):
            known.decider = clean(decoded(each["value"]).decode("ascii", "replace"))
            known.decider_revision = int(each["mod_revision"])
        beat = ranges["decider_beat"].get("kvs", ())
        for each in ranges["seats"].get("kvs", ()):
            self._read_seats(each)
        plan = self._read_plan(ranges, decides)
        known.seats = revision
        reports: list[tuple[Report, bool]] = []
        for each in ranges.get("reports", {}).get("kvs", ()):
            with contextlib.suppress(MessageError):  # no node has written that
                said = _plain(each["value"])
                reports.append((from_plain(Report, said.get("report")), said.get("gone") is True))
        if decides:
            known.reports = revision
        beats = {
            decoded(each["key"]).decode("ascii", "replace").rpartition("/")[2]: int(each["mod_revision"])
            for each in ranges.get("beats", {}).get("kvs", ())
        }
        return Told(
            sent_s=sent_s,
            plan=plan,
            written_s=known.written_s,
            has_plan=int(ranges["head"].get("count", "0")) > 0,
            decider=known.decider,
            decider_beat=int(beat[0]["mod_revision"]) if beat and asked_for == known.decider else 0,
            beats=beats if decides else None,
            reports=reports,
            local_addr=self._client.local_addr(),
        )

    def _read_seats(self, kv: Mapping[str, str]) -> None:
        said = _plain(kv["value"])
        generation = from_plain(int, said.get("generation"))
        seats = tuple(from_plain(Seat, each) for each in said.get("seats", ()))
        shard = decoded(kv["key"]).decode("ascii", "replace").rpartition("/")[2]
        self._known.all_seats[shard] = (generation, seats)
        if shard == _shard(self._node):
            own = next((seat for seat in seats if seat.node == self._node), None)
            self._known.own_seat = (generation, own)

    def _read_plan(self, ranges: Mapping[str, Any], decides: bool) -> Plan | None:
        known = self._known
        found = ranges["head"].get("kvs", ())
        if not found:
            return None
        said = _plain(found[0]["value"])
        plan: Plan = from_plain(Plan, said.get("plan"))
        known.plan, known.written_s, known.head = (
            plan,
            from_plain(float, said.get("now_s")),
            int(found[0]["mod_revision"]),
        )
        if not decides:
            generation, seat = known.own_seat
            return plan.for_seat(seat if generation == plan.generation else None)
        seats = [
            seat for generation, some in known.all_seats.values() if generation == plan.generation for seat in some
        ]
        return replace(plan, seats=tuple(sorted(seats, key=lambda seat: seat.node_rank)))

    # -- writing

    def _enter(self) -> None:
        """Find the job, or begin it. Raises RefusedError if this node was started for another."""
        lease = self._grant()
        said = json.dumps({"gpulaunch": VERSION, "register": to_plain(self._register), "lease": lease})
        key = self._key("job")
        body = {
            "compare": [_compare(key, "CREATE", 0)],
            "success": [_put(key, said, lease)],
            "failure": [_range({"key": key})],
        }
        answer = self._client.call("kv/txn", body)
        if answer.get("succeeded"):
            self._job_lease, self._known.job = lease, int(answer["header"]["revision"])
            return
        self._client.call("lease/revoke", {"ID": lease})
        (found,) = answer["responses"][0]["response_range"]["kvs"]
        theirs = _plain(found["value"])
        if theirs.get("gpulaunch") != VERSION:
            spoken = clean(str(theirs.get("gpulaunch")))[:20]
            raise RefusedError(
                f"the job {self._register.run_id!r} in etcd is of version {spoken} of the protocol, not {VERSION}; "
                "install the same gpulaunch on all nodes"
            )
        register = from_plain(Register, theirs.get("register"))
        ours = self._register
        why = mismatch(register, ours, who="this node", leader=f"the job {ours.run_id!r}")
        if why:
            raise RefusedError(f"{why}, and another --rdzv-id for another job")
        if register.max_restarts != ours.max_restarts:  # the next decider would have another limit
            raise RefusedError(
                f"this node was started with --max-restarts {ours.max_restarts}, the job {ours.run_id!r} with "
                f"{register.max_restarts}; use the same on all nodes"
            )
        self._job_lease, self._known.job = from_plain(str, theirs.get("lease")), int(found["create_revision"])

    def _keep_leases(self) -> None:
        if not self._lease:
            self._lease = self._grant()
        elif time.monotonic() > self._kept_s + LEASE_S / 5:
            self._client.call("lease/keepalive", {"ID": self._lease})
            plan = self._known.plan
            if self._decides and not (plan is not None and plan.stage is Stage.OVER):
                self._client.call("lease/keepalive", {"ID": self._job_lease})
        else:
            return
        self._kept_s = time.monotonic()

    def _grant(self) -> str:
        return str(self._client.call("lease/grant", {"TTL": LEASE_S})["ID"])

    def _take(self) -> None:
        compare = [_compare(self._key("decider"), "MOD", self._known.decider_revision)]
        put = _put(self._key("decider"), self._node, self._lease)
        self._client.call("kv/txn", {"compare": compare, "success": [put]})

    def _write(self, plan: Plan) -> bool:
        """Whether this plan has replaced the one that was read."""
        known = self._known
        said = {"plan": to_plain(replace(plan, seats=())), "now_s": time.monotonic()}
        puts = [_put(self._key("head"), json.dumps(said), self._job_lease)]
        before = known.plan.generation if known.plan is not None else 0
        if plan.seats and plan.generation != before:
            shards: dict[str, list[Seat]] = {}
            for seat in plan.seats:
                shards.setdefault(_shard(seat.node), []).append(seat)
            for shard, seats in shards.items():
                value = {"generation": plan.generation, "seats": [to_plain(seat) for seat in seats]}
                puts.append(_put(self._key(f"seats/{shard}"), json.dumps(value), self._job_lease))
        compare = [
            _compare(self._key("decider"), "MOD", known.decider_revision),
            _compare(self._key("head"), "MOD", known.head),
        ]
        return bool(self._client.call("kv/txn", {"compare": compare, "success": puts}).get("succeeded"))

    def _put_report(self, *, gone: bool) -> dict[str, Any]:
        assert self._report is not None, "asked for when there is one"
        report = replace(self._report, plan=None)  # the plan is in etcd
        if report.cause is not None:
            age_s = report.cause.age_s + time.monotonic() - self._report_s
            report = replace(report, cause=replace(report.cause, age_s=age_s))
        said = {"report": to_plain(report), "gone": gone}
        return _put(self._key(f"reports/{self._node}"), json.dumps(said), self._lease)

    def _remove_job(self) -> None:
        lease, self._job_lease = self._job_lease, ""
        self._known = _Known(report=self._known.report)
        if lease:
            self._client.call("lease/revoke", {"ID": lease})

    def _key(self, name: str) -> str:
        return encoded(self._base + name)


def _shard(node: str) -> str:
    """Of the keys with seats, that with the node's."""
    return f"{zlib.crc32(node.encode()) % _SHARDS:02x}"


def _plain(value: str) -> dict[str, Any]:
    try:
        said: Any = json.loads(decoded(value))
    except (ValueError, RecursionError) as err:
        raise MessageError("not JSON") from err
    if not isinstance(said, dict):
        raise MessageError("object expected")
    return said


def _put(key: str, value: str, lease: str) -> dict[str, Any]:
    return {"request_put": {"key": key, "value": encoded(value), "lease": lease}}


def _delete(key: str) -> dict[str, Any]:
    return {"request_delete_range": {"key": key}}


def _range(keys: Mapping[str, str], *, after: int = 0, keys_only: bool = False) -> dict[str, Any]:
    return {"request_range": {**keys, "keys_only": keys_only, "min_mod_revision": str(after + 1 if after else 0)}}


def _compare(key: str, target: str, revision: int) -> dict[str, Any]:
    field_ = {"CREATE": "create_revision", "MOD": "mod_revision"}[target]
    return {"key": key, "target": target, "result": "EQUAL", field_: str(revision)}
