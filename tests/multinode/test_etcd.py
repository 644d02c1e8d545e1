"""The plan in a real etcd of three members: what its client promises, and the loss of any node and of any member."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import etcd
import pytest
from hosts import Host, hosts

from gpulaunch.launcher.cli import doctor
from gpulaunch.launcher.failure.causes import Cause, Tier
from gpulaunch.launcher.rendezvous import etcd_session
from gpulaunch.launcher.rendezvous.base import RendezvousError
from gpulaunch.launcher.rendezvous.etcd_access import Access
from gpulaunch.launcher.rendezvous.etcd_client import EtcdAwayError, EtcdClient, EtcdError, encoded, under
from gpulaunch.launcher.rendezvous.etcd_session import Ask, EtcdSession, RefusedError, Told
from gpulaunch.launcher.rendezvous.messages import Register
from gpulaunch.launcher.rendezvous.plan import NodeState, Plan, Report, Seat, Stage
from job import SILENCE_S, SOON, Job
from needed import program

pytestmark = [pytest.mark.light]

ETCD = ("--rdzv-backend", "etcd", "--rdzv-endpoint", "host0,host1,host2", "--insecure")
FENCED = "etcd has not answered for 7.5 s: the ranks here are ended"
WITH_ETCD_S = 20.0
"""The same where a member of etcd, maybe its leader, is lost with the node: the silence is counted anew after that."""


# -- the client, on ports of this machine


@pytest.fixture
def three_members(tmp_path: Path) -> Iterator[etcd.Members]:
    with etcd.members(3, tmp_path) as members:
        yield members


@pytest.fixture
def one_member(tmp_path: Path) -> Iterator[etcd.Members]:
    with etcd.members(1, tmp_path) as members:
        yield members


_CLIENTS: list[EtcdClient] = []


@pytest.fixture(autouse=True)
def clients_are_closed() -> Iterator[None]:
    yield
    while _CLIENTS:
        _CLIENTS.pop().close()


def client_of(access: Access) -> EtcdClient:
    _CLIENTS.append(EtcdClient(access, access.context()))
    return _CLIENTS[-1]


def session(members: etcd.Members, node: str, least: int = 1, run_id: str = "job") -> EtcdSession:
    """Of a node that has begun."""
    register = Register(run_id=run_id, min_nodes=least, max_nodes=4096, max_restarts=0)
    made = EtcdSession(client_of(Access(endpoints=members.endpoints)), "/test", register, node)
    made.turn(Ask(report=Report(node=node, host=f"host-{node}", nproc=1)))
    return made


def take(session: EtcdSession) -> Told:
    """This node decides from now on."""
    session.turn(Ask())
    session.turn(Ask(takes=True))
    return session.turn(Ask(decides=True))


def test_only_the_decider_that_etcd_names_writes_and_only_over_what_it_has_read(one_member: etcd.Members) -> None:
    first, second = session(one_member, "aa"), session(one_member, "bb")
    take(first)
    plan = Plan(job="1", since_s=5.0)
    assert first.turn(Ask(decides=True, plan=plan)).wrote
    told = take(second)
    assert told.plan == plan

    assert not first.turn(Ask(decides=True, plan=Plan(job="2"))).wrote  # it has not heard yet that it does not decide
    told = first.turn(Ask())
    assert told.decider == "bb"
    assert second.turn(Ask(decides=True, plan=Plan(job="3"))).plan == Plan(job="3")
    assert first.turn(Ask()).plan == Plan(job="3")
    assert first.turn(Ask()).plan is None  # nothing is new


def test_a_compaction_of_etcd_changes_nothing(one_member: etcd.Members) -> None:
    """Managed clusters forget old revisions every few minutes; nothing here asks for one."""
    first, second = session(one_member, "aa"), session(one_member, "bb")
    take(first)
    client = client_of(Access(endpoints=one_member.endpoints))
    for number in range(3):
        plan = Plan(job=f"{number}", since_s=5.0)
        assert first.turn(Ask(decides=True, plan=plan)).wrote
        revision = client.call("kv/range", {"key": "AA=="})["header"]["revision"]
        client.call("kv/compaction", {"revision": revision, "physical": True})
        assert second.turn(Ask()).plan == plan
    told = second.turn(Ask(takes=True))
    assert told.decider == "bb"


def test_one_of_many_that_want_to_decide_does(three_members: etcd.Members) -> None:
    sessions = [session(three_members, f"{number:02x}") for number in range(8)]
    for _ in range(5):
        threads = [threading.Thread(target=each.turn, args=[Ask(takes=True)]) for each in sessions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        named = {each.turn(Ask()).decider for each in sessions}
        assert len(named) == 1
        wrote = [each.turn(Ask(decides=True, plan=Plan(job=os.urandom(4).hex()))).wrote for each in sessions]
        assert [number for number, done in enumerate(wrote) if done] == [int(named.pop(), 16)]


def test_a_node_reads_its_own_seat_of_4096(one_member: etcd.Members) -> None:
    """In one transaction, and no node reads what belongs to all."""
    decider = session(one_member, "00")
    take(decider)
    seats = tuple(
        Seat(node=f"{rank:016x}", host=f"gpu-node-{rank}.cluster.example", node_rank=rank, nproc=8, first_rank=8 * rank)
        for rank in range(4096)
    )
    plan = Plan(stage=Stage.RUNNING, generation=1, seats=seats, nnodes=4096, world_size=8 * 4096)
    told = decider.turn(Ask(decides=True, plan=plan))
    assert told.wrote
    assert told.plan == plan

    node = session(one_member, seats[4000].node)
    again = session(one_member, seats[4000].node)
    assert again.turn(Ask()).plan is None  # read when it began
    assert take(node).plan == plan
    stopping = Plan(stage=Stage.STOPPING, generation=1, seats=seats, nnodes=4096, world_size=8 * 4096)
    node.turn(Ask(decides=True, plan=stopping))
    told = again.turn(Ask())
    assert told.plan == stopping.for_seat(seats[4000])


def test_reports_are_told_when_they_change_and_a_cause_grows_older(one_member: etcd.Members) -> None:
    decider, node = session(one_member, "aa"), session(one_member, "bb")
    told = take(decider)
    assert told.beats is not None
    assert {report.node for report, _ in told.reports} == {"aa", "bb"} == set(told.beats)
    node.turn(Ask())
    later = decider.turn(Ask(decides=True))
    assert later.beats is not None
    assert later.beats["bb"] > told.beats["bb"]
    assert later.reports == []

    cause = Cause(text="ValueError", tier=Tier.OWN, age_s=1.0)
    report = Report(node="bb", host="host-bb", nproc=1, state=NodeState.ENDED, generation=1, cause=cause)
    node.turn(Ask(report=report))
    node.leave(over=False)
    told = decider.turn(Ask(decides=True))
    ((left, gone),) = told.reports
    assert gone
    assert left.cause is not None
    assert 1.0 < left.cause.age_s < 3.0
    assert told.beats is not None
    assert set(told.beats) == {"aa"}


def test_what_a_node_leaves_behind_goes_with_its_lease_and_it_can_come_back(
    one_member: etcd.Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    decider = session(one_member, "aa")
    monkeypatch.setattr(etcd_session, "LEASE_S", 2)
    node = session(one_member, "bb")
    take(decider)
    until_s = time.monotonic() + 10
    while set(decider.turn(Ask(decides=True)).beats or ()) != {"aa"}:
        assert time.monotonic() < until_s
        time.sleep(0.1)

    with pytest.raises(EtcdError, match="requested lease not found"):
        node.turn(Ask())
    node.turn(Ask())
    told = decider.turn(Ask(decides=True))
    assert [report.host for report, _ in told.reports] == ["host-bb"]


def test_the_last_one_removes_the_job(one_member: etcd.Members) -> None:
    first, second = session(one_member, "aa"), session(one_member, "bb")
    take(first)
    first.turn(Ask(decides=True, plan=Plan(job="old", stage=Stage.OVER)))
    first.leave(over=True)
    assert second.turn(Ask()).has_plan
    second.leave(over=True)

    assert not session(one_member, "cc").turn(Ask()).has_plan


def test_a_node_that_was_started_for_another_job_is_refused(one_member: etcd.Members) -> None:
    session(one_member, "aa", least=1)
    with pytest.raises(RefusedError, match="started with --nnodes 2:4096, the job 'job' with 1:4096"):
        session(one_member, "bb", least=2)
    session(one_member, "bb", least=2, run_id="other")


def test_a_node_of_another_version_is_refused_and_a_strangers_report_is_not_read(
    one_member: etcd.Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    decider = session(one_member, "aa")
    for value in ("no JSON", "[]", '{"report": {"node": 1}}'):
        put = {"key": encoded(f"/test/job/reports/{len(value)}"), "value": encoded(value)}
        client_of(Access(endpoints=one_member.endpoints)).call("kv/put", put)
    assert [report.node for report, _ in take(decider).reports] == ["aa"]

    monkeypatch.setattr(etcd_session, "VERSION", 99)
    with pytest.raises(RefusedError, match=r"version \d+ of the protocol, not 99; install the same gpulaunch"):
        session(one_member, "bb")


def test_a_watch_tells_of_a_change_at_once_and_can_be_ended(one_member: etcd.Members) -> None:
    access = Access(endpoints=one_member.endpoints)
    watcher, other = client_of(access), client_of(access)
    told = threading.Semaphore(0)

    def watch() -> None:
        with contextlib.suppress(EtcdAwayError):
            for _ in watcher.watch([{"key": encoded("key")}, under("reports/")]):
                told.release()

    thread = threading.Thread(target=watch)
    thread.start()
    time.sleep(0.5)
    for key, counts in (("key", True), ("reports/1", True), ("kez", False)):
        other.call("kv/put", {"key": encoded(key), "value": encoded("1")})
        assert told.acquire(timeout=0.5 if counts else 1.0) is counts
    watcher.interrupt()
    thread.join(5.0)
    assert not thread.is_alive()


def test_another_member_answers_when_one_does_not(three_members: etcd.Members) -> None:
    client = client_of(Access(endpoints=three_members.endpoints))
    client.learn_members()
    for member in (three_members.all[0], three_members.leader()):
        member.signal(signal.SIGSTOP)
        ends_s = time.monotonic() + 15.0  # where a leader is to be elected first, a call says so
        while True:
            try:
                client.call("kv/put", {"key": encoded("key"), "value": encoded("1")})
                break
            except EtcdAwayError:
                assert time.monotonic() < ends_s
        member.signal(signal.SIGCONT)
        three_members.leader()


def test_no_majority_is_certain_only_where_the_members_say_so(three_members: etcd.Members) -> None:
    client = client_of(Access(endpoints=three_members.endpoints))
    client.learn_members()
    stopped = [each for each in three_members.all if each is not three_members.leader()]
    stopped += [each for each in three_members.all if each not in stopped]

    def trouble() -> EtcdAwayError:
        """Once the members have seen that they have no leader."""
        time.sleep(3.0)
        with pytest.raises(EtcdAwayError) as caught:
            client.call("kv/put", {"key": encoded("key"), "value": encoded("1")})
        return caught.value

    for each in stopped[:2]:
        each.signal(signal.SIGSTOP)
    assert not trouble().no_majority  # they may be at work, out of this client's reach
    for each in stopped[:2]:
        each.signal(signal.SIGCONT)
    three_members.leader()
    for each in stopped[:2]:
        each.signal(signal.SIGKILL)
    assert trouble().no_majority


def test_a_member_that_is_not_in_the_list_may_have_the_others(three_members: etcd.Members) -> None:
    client = client_of(Access(endpoints=three_members.endpoints[:1]))
    client.learn_members()
    three_members.all[0].signal(signal.SIGKILL)

    with pytest.raises(EtcdAwayError) as caught:
        client.call("kv/put", {"key": encoded("key"), "value": encoded("1")})
    assert not caught.value.no_majority


def examined(members: etcd.Members, *options: str, listed: int = 3) -> tuple[int, list[tuple[str, str]]]:
    """The doctor's exit code, and the status and value of each line."""
    endpoints = ",".join(f"{host}:{port}" for host, port in members.endpoints[:listed])
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(doctor, "answer", said.append)
        code = doctor.run(["--json", "--rdzv-backend", "etcd", "--rdzv-endpoint", endpoints, *options])
    return code, [(each["status"], each["value"]) for each in json.loads(said[0])["checks"]]


def test_the_doctor_names_the_members_that_do_not_answer(three_members: etcd.Members) -> None:
    first, second, third = (f"{host}:{port}" for host, port in three_members.endpoints)
    code, lines = examined(three_members)
    assert (code, [status for status, _ in lines]) == (0, ["ok"] * 4), lines
    assert lines[0][1].startswith(f"{first} answers, and has a leader (etcd 3.")
    assert lines[3][1] == "has 3 members, and can be read and written"
    assert client_of(Access(endpoints=three_members.endpoints)).call("kv/range", under("/gpulaunch")).get("kvs") is None
    code, lines = examined(three_members, listed=1)
    assert (code, lines[1]) == (0, ("warn", "has 3 members, of which --rdzv-endpoint lists 1"))

    three_members.all[2].signal(signal.SIGKILL)
    three_members.leader()
    code, lines = examined(three_members)
    assert (code, lines[2]) == (0, ("warn", f"{third} refuses: etcd does not run there"))
    three_members.all[1].signal(signal.SIGSTOP)
    time.sleep(3.0)  # until the first has noticed
    code, lines = examined(three_members)
    three_members.all[1].signal(signal.SIGCONT)
    assert code == 1
    assert lines[1] == ("warn", f"{second} does not answer")
    assert lines[3] == ("fail", "no member with a leader answers: no group can form")


def test_user_and_password(one_member: etcd.Members, tmp_path: Path) -> None:
    def ask(path: str, **body: object) -> None:
        client_of(Access(endpoints=one_member.endpoints)).call(path, body)

    for user in ("root", "job"):
        ask("auth/user/add", name=user, password="secret of " + user)
        ask("auth/role/add", name=user)
    ask(
        "auth/role/grant",
        name="job",
        perm={"permType": "READWRITE", "key": encoded("/test/"), "range_end": encoded("/test0")},
    )
    for user in ("root", "job"):
        ask("auth/user/grant", user=user, role=user)
    ask("auth/enable")

    def begin(user: str, password: str, prefix: str) -> None:
        access = Access(endpoints=one_member.endpoints, user=user, password=password)
        register = Register(run_id="job", min_nodes=1, max_nodes=2, max_restarts=0)
        node = EtcdSession(client_of(access), prefix, register, "aa")
        node.turn(Ask(report=Report(node="aa", host="host", nproc=1)))
        node.leave(over=True)

    (tmp_path / "password").write_text("secret of job")
    conf = f"user=job,password_file={tmp_path / 'password'},etcd_prefix="
    code, lines = examined(one_member, "--rdzv-conf", conf + "/test")
    assert (code, lines[1]) == (0, ("warn", "has 1 member, and can be read and written"))
    code, lines = examined(one_member, "--rdzv-conf", conf + "/elsewhere")
    assert (code, lines[1]) == (1, ("fail", "refuses: etcdserver: permission denied"))

    begin("job", "secret of job", "/test")
    with pytest.raises(EtcdError, match="user name is empty") as caught:
        begin("", "", "/test")
    assert caught.value.is_final
    with pytest.raises(EtcdError, match="invalid user ID or password") as caught:
        begin("job", "wrong", "/test")
    assert caught.value.is_final
    with pytest.raises(EtcdError, match="permission denied") as caught:
        begin("job", "secret of job", "/elsewhere")
    assert caught.value.is_final
    assert "secret" not in repr(Access(endpoints=(), user="job", password="secret of job"))


def test_tls_with_certificates_of_both_sides(tmp_path: Path) -> None:
    openssl = program("openssl", package="openssl")

    def run(*words: str) -> None:
        subprocess.run([openssl, *words], check=True, capture_output=True, cwd=tmp_path)

    run("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca")
    (tmp_path / "ext").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    for name in ("server", "client"):
        run(
            "req",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-keyout",
            f"{name}.key",
            "-out",
            f"{name}.csr",
            "-subj",
            f"/CN={name}",
        )
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "ext", "-out", f"{name}.pem")
        run("x509", "-req", "-in", f"{name}.csr", *signed)
    path = {name: str(tmp_path / name) for name in ("ca.pem", "server.pem", "server.key", "client.pem", "client.key")}
    options = ("--cert-file", path["server.pem"], "--key-file", path["server.key"], "--client-cert-auth")
    with etcd.members(1, tmp_path, tls=(*options, "--trusted-ca-file", path["ca.pem"])) as members:

        def ask(cacert: str, cert: str, key: str) -> None:
            access = Access(endpoints=members.endpoints, tls=True, cacert=cacert, cert=cert, key=key)
            client_of(access).call("kv/put", {"key": encoded("key"), "value": encoded("1")})

        until_s = time.monotonic() + 20
        while True:
            try:
                ask(path["ca.pem"], path["client.pem"], path["client.key"])
                break
            except EtcdAwayError:  # it starts
                assert time.monotonic() < until_s
                time.sleep(0.1)
        with pytest.raises(EtcdAwayError):  # without a certificate of its own
            ask(path["ca.pem"], "", "")
        with pytest.raises(EtcdAwayError, match="certificate verify failed"):  # by the system's authorities
            ask("", path["client.pem"], path["client.key"])
    with pytest.raises(RendezvousError, match="cacert, cert or key cannot be used"):
        Access(endpoints=(), tls=True, cacert=path["server.key"]).context()


# -- jobs, on hosts of their own


class Group:
    """Four hosts with a job that trains, members of etcd on the first three."""

    def __init__(self, four: list[Host], directory: Path) -> None:
        self.hosts = four
        self.names = [host.name for host in four]
        self.members = etcd.on_hosts(four[:3], directory)
        self.job = Job(directory, "2:4", *SOON, *ETCD)

    def start(self) -> None:
        self.job.start(*self.hosts)
        self.job.until_trains(*self.names)

    def lose(self, host: Host, within_s: float) -> None:
        """Power a host off; the others go on."""
        others = [name for name in self.names if name != host.name]
        gone_s = time.monotonic()
        host.power_off()
        assert self.job.until_trains(*others, after_s=gone_s) - gone_s < within_s
        for name in others:
            assert f"({host.name}) is lost" in self.job.nodes[name].said
        del self.job.nodes[host.name]

    def attempts(self) -> set[int]:
        return {step["attempt"] for node in self.job.nodes.values() for step in node.steps()}

    def signal_members(self, signum: signal.Signals, *numbers: int) -> None:
        for number in numbers:
            self.members.all[number].signal(signum, self.hosts[number])

    def end(self) -> None:
        assert set(self.job.end().values()) == {0}


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    with hosts(4) as four:
        yield Group(four, tmp_path)


@pytest.mark.root
def test_the_loss_of_the_decider_and_then_of_the_first_node_is_survived(group: Group) -> None:
    group.job.start(group.hosts[3])  # on a host without a member of etcd
    group.job.until(lambda: etcd.decider(group.hosts[3], group.members) == "host3", "it decides")
    group.job.start(*group.hosts[:3])
    group.job.until_trains(*group.names)

    group.lose(group.hosts[3], SILENCE_S)
    group.names.remove("host3")
    group.lose(group.hosts[0], WITH_ETCD_S)  # and its member of etcd
    group.end()


@pytest.mark.root
def test_a_node_that_is_cut_off_ends_its_ranks_although_its_own_member_says_that_there_is_no_leader(
    group: Group,
) -> None:
    group.start()
    gone_s = time.monotonic()
    group.hosts[0].cut()

    group.job.until(
        lambda: "etcd has not answered for 7.5 s" in group.job.nodes["host0"].said, "it fences itself", 12.0
    )
    group.job.until_trains("host1", "host2", "host3", after_s=gone_s)
    healed_s = time.monotonic()
    group.hosts[0].heal()
    group.job.until_trains(*group.names, after_s=healed_s)
    group.end()


@pytest.mark.root
def test_the_leader_of_etcd_is_killed_and_a_rank_with_it_and_a_flap_changes_nothing(group: Group) -> None:
    group.start()
    number = etcd.etcd_leader(group.hosts[3], group.members)
    killed_s = time.monotonic()
    group.signal_members(signal.SIGKILL, number)
    group.hosts[3].kill(group.job.nodes["host3"].rank_pid(), signal.SIGKILL)
    group.job.until(lambda: group.job.trains(*group.names, after_s=killed_s + 1.0), "all train again", 12.0)
    attempts = group.attempts()

    group.hosts[3].cut()
    group.job.pause(5.0)
    group.hosts[3].heal()
    group.job.pause(12.0)
    assert group.attempts() == attempts
    group.end()


@pytest.mark.root
def test_without_a_majority_the_ranks_train_on_where_that_is_certain_and_are_ended_where_it_is_not(
    group: Group,
) -> None:
    group.start()
    attempts = group.attempts()
    group.signal_members(signal.SIGKILL, 0, 1)
    group.job.pause(15.0)
    now_s = time.monotonic()
    group.job.until_trains(*group.names, after_s=now_s, within_s=2.0)
    for number in (0, 1):
        group.members.all[number].start(group.members.initial, group.hosts[number])
    group.job.pause(12.0)
    assert group.attempts() == attempts

    group.signal_members(signal.SIGSTOP, 0, 1)
    group.job.until(lambda: any(FENCED in node.said for node in group.job.nodes.values()), "ranks are ended", 15.0)
    group.job.pause(3.0)
    began_s = time.monotonic()
    group.job.pause(3.0)
    assert all(node.steps()[-1]["at_s"] < began_s for node in group.job.nodes.values())
    back_s = time.monotonic()
    group.signal_members(signal.SIGCONT, 0, 1)
    group.job.until_trains(*group.names, after_s=back_s)
    group.end()


@pytest.mark.root
def test_an_agent_that_is_killed_is_lost_at_once_and_the_job_can_be_run_again_at_once(group: Group) -> None:
    group.start()
    name = etcd.decider(group.hosts[3], group.members)
    killed_s = time.monotonic()
    group.job.signal(name, signal.SIGKILL)
    others = [each for each in group.names if each != name]
    assert group.job.until_trains(*others, after_s=killed_s) - killed_s < 8.0
    del group.job.nodes[name]
    group.end()

    again_s = time.monotonic()
    group.start()
    assert group.job.until_trains(*group.names, after_s=again_s) - again_s < 15.0
    group.end()
