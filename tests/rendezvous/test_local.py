"""One node: the store's socket is there before anything else, reachable by its address and by nothing more."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from gpulaunch.launcher.policy.restart import Limits
from gpulaunch.launcher.rendezvous import listen
from gpulaunch.launcher.rendezvous.base import RendezvousError
from gpulaunch.launcher.rendezvous.local import LocalRendezvous
from ports import free_port, has_ipv6

LIMITS = Limits(max_restarts=0, rate=None, backoff_max_s=30.0, no_progress=None)


@pytest.fixture
def local(turning: Any, record: Callable[..., Any]) -> Callable[..., Any]:
    def make(addr: str = "localhost", port: int | None = None, nproc: int = 2) -> Any:
        return record(LocalRendezvous(turning.loop, nproc=nproc, master_addr=addr, master_port=port, limits=LIMITS))

    return make


def listens(fd: int) -> str:
    """The address that the descriptor listens at."""
    with socket.socket(fileno=os.dup(fd)) as sock:
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
        return str(sock.getsockname()[0])


def test_join_is_answered_later_and_with_the_whole_world(turning: Any, local: Callable[..., Any]) -> None:
    node = local(nproc=3)

    node.join(0)

    assert node.worlds == []
    turning.until(lambda: node.worlds)
    world = node.worlds[0]
    assert (world.attempt, world.nnodes, world.node_rank, world.first_rank, world.world_size) == (0, 1, 0, 0, 3)
    assert world.master_addr == "localhost"
    turning.client(world.master_port).close()


@pytest.mark.parametrize(("addr", "bound"), [("localhost", "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("::1", "::1")])
def test_a_loopback_job_listens_on_loopback_only(
    turning: Any, local: Callable[..., Any], addr: str, bound: str
) -> None:
    if addr == "::1" and not has_ipv6():
        pytest.skip("no IPv6 on this machine")
    node = local(addr)
    node.join(0)
    turning.until(lambda: node.worlds)

    assert listens(node.worlds[0].store_fd) == bound


def test_the_older_family_is_taken_when_a_name_means_both(
    turning: Any, local: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients try every address of a name; some tools of users only know IPv4."""

    def resolve(host: str, port: int) -> Any:
        return [(socket.AF_INET6, ("::1", port)), (socket.AF_INET, ("127.0.0.1", port))]

    monkeypatch.setattr(listen, "resolve", resolve)
    node = local("localhost")

    node.join(0)
    turning.until(lambda: node.worlds)
    assert listens(node.worlds[0].store_fd) == "127.0.0.1"


def test_without_a_port_every_attempt_has_its_own(turning: Any, local: Callable[..., Any]) -> None:
    """A rank of attempt 0 that still lives cannot reach the store of attempt 1."""
    node = local()
    node.join(0)
    turning.until(lambda: len(node.worlds) == 1)
    old = turning.client(node.worlds[0].master_port)
    node.fail()
    node.join(1)
    turning.until(lambda: len(node.worlds) == 2)

    assert node.attempts == [0, 1]
    turning.client(node.worlds[1].master_port)
    turning.until(lambda: turning.ended_by_peer(old))


def test_a_given_port_is_held_over_all_attempts(turning: Any, local: Callable[..., Any]) -> None:
    port = free_port()
    node = local("127.0.0.1", port)
    for attempt in (0, 1):
        node.join(attempt)
        turning.until(lambda: len(node.worlds) == attempt + 1)  # noqa: B023  # used at once
        with pytest.raises(RendezvousError):
            local("127.0.0.1", port)

    assert [world.master_port for world in node.worlds] == [port, port]
    assert node.worlds[0].store_fd == node.worlds[1].store_fd


def test_close_gives_the_port_back_and_silences_what_was_asked(turning: Any, local: Callable[..., Any]) -> None:
    port = free_port()
    node = local("127.0.0.1", port)
    node.join(0)
    node.rendezvous.close()
    node.rendezvous.close()
    turning.for_s(0.1)

    assert node.worlds == []
    local("127.0.0.1", port)


def test_a_port_in_use_names_the_port_the_holder_and_the_way_out(local: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RendezvousError) as caught:
            local("localhost", port)

    message = str(caught.value)
    assert f"port {port}" in message
    assert f"process {os.getpid()} (" in message
    assert "--master-port" in message
    assert "\n" not in message


def test_an_address_of_another_machine_is_said_so(local: Callable[..., Any]) -> None:
    with pytest.raises(RendezvousError, match=r"192\.0\.2\.1 is not an address of this machine; check --master-addr"):
        local("192.0.2.1", free_port())  # TEST-NET-1


def test_a_name_that_means_nothing_is_said_so(local: Callable[..., Any]) -> None:
    with pytest.raises(RendezvousError, match=r"no-such-host\.invalid cannot be resolved"):
        local("no-such-host.invalid", free_port())


@pytest.mark.parametrize(("ok", "done"), [(True, 1), (False, 0)])
def test_all_is_done_when_this_node_is(turning: Any, local: Callable[..., Any], ok: bool, done: int) -> None:
    node = local()
    node.join(0)
    turning.until(lambda: node.worlds)
    node.rendezvous.succeeded() if ok else node.fail(final=True)

    assert node.done == 0
    turning.for_s(0.1)
    assert node.done == done


STORE = """
import sys, torch.distributed as dist
from datetime import timedelta
store = dist.TCPStore("localhost", int(sys.argv[1]), None, True, timedelta(seconds=30), wait_for_workers=False,
                      master_listen_fd=int(sys.argv[2]))
store.set("attempt", sys.argv[3])
print("up", flush=True)
sys.stdin.read()
"""
CLIENT = """
import sys, torch.distributed as dist
from datetime import timedelta
print(dist.TCPStore("localhost", int(sys.argv[1]), None, False, timedelta(seconds=30)).get("attempt").decode())
"""


@pytest.mark.torch
def test_torch_finds_the_store_of_each_attempt(turning: Any, local: Callable[..., Any]) -> None:
    """A real client with MASTER_ADDR=localhost, and on the same socket a second store after the first was killed."""
    node = local("localhost", free_port())
    heard = []
    for attempt in (0, 1):
        node.join(attempt)
        turning.until(lambda: len(node.worlds) == attempt + 1)  # noqa: B023  # used at once
        world = node.worlds[-1]
        argv = [sys.executable, "-c", STORE, str(world.master_port), str(world.store_fd), str(attempt)]
        with subprocess.Popen(
            argv, pass_fds=(world.store_fd,), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as store:
            assert store.stdout is not None
            assert store.stdout.readline() == "up\n"
            client = subprocess.run(
                [sys.executable, "-c", CLIENT, str(world.master_port)], capture_output=True, text=True, check=True
            )
            heard.append(client.stdout.strip())
            store.kill()

    assert heard == ["0", "1"]
