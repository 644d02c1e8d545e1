"""`gpulaunch doctor --rdzv-endpoint HOST:PORT`: which step on the way to the leader fails, if any."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator

from gpulaunch.launcher.cli.checks import Finding, Status, resolve
from gpulaunch.launcher.rendezvous.auth import Authenticator, AuthError
from gpulaunch.launcher.rendezvous.codec import MessageError
from gpulaunch.launcher.rendezvous.listen import format_address, interface_of, is_here, is_loopback
from gpulaunch.launcher.rendezvous.messages import MAX_LINE_BYTES, Beat, Challenge, Message, decode, encode

_TIMEOUT_S = 3.0
_CLOCK_S = 2.0
"""How far apart the clocks of two nodes may be."""
_FIREWALL = "a firewall, a wrong address, or a host that is down: try from another host"


def endpoint(host: str, port: int, token: bytes | None) -> Iterator[Finding]:
    """Resolve the name, connect, have the leader answer, prove the token, compare the clocks."""
    addresses, took_s = resolve(host, _TIMEOUT_S)
    if not addresses:
        yield finding(
            "FAIL", "resolve", f"{host} does not resolve", "add it to the DNS or to /etc/hosts, or give an address"
        )
        return
    here = is_here(host, port)
    value = f"{host} is {', '.join(addresses)} ({took_s * 1e3:.0f} ms)"
    if all(map(is_loopback, addresses)) and not here:
        yield finding("FAIL", "resolve", value, "that is this machine: correct /etc/hosts")
        return
    yield finding("OK", "resolve", f"{value}{', this machine: it would lead' if here else ''}")
    where = format_address(host, port)
    try:
        sock = socket.create_connection((host, port), timeout=_TIMEOUT_S)
    except OSError as err:
        yield _not_connected(where, err, here)
        return
    with sock:
        own = str(sock.getsockname()[0]).removeprefix("::ffff:")
        interface = interface_of(own)
        yield finding("OK", "connect", f"{where}, from {own}{f' ({interface})' if interface else ''}")
        yield from _answered(sock, where, token)


def _not_connected(where: str, err: OSError, here: bool) -> Finding:
    if err.errno == errno.ECONNREFUSED and here:
        return finding("OK", "connect", f"{where} is free: an agent that starts here leads")
    if err.errno == errno.ECONNREFUSED:
        return finding(
            "WARN", "connect", f"{where} refuses: nothing listens there", "start gpulaunch on that host, too"
        )
    why = "does not answer" if isinstance(err, TimeoutError) else f"cannot be reached: {err.strerror or err}"
    return finding("FAIL", "connect", f"{where} {why}", _FIREWALL)


def _answered(sock: socket.socket, where: str, token: bytes | None) -> Iterator[Finding]:
    began_s = time.monotonic()
    try:
        leader_unix_s = _exchange(sock, token)
    except AuthError as err:
        what = f"what answers at {where} {str(err).partition(';')[0]}"
        yield finding("FAIL", "leader", what, "give the same --token-file on every node")
        return
    except EOFError:
        why = "another token, or no leader" if token else "no leader, or of another version"
        yield finding("FAIL", "leader", f"{where} closes the connection", f"{why}: its console says more")
        return
    except MessageError as err:
        yield finding(
            "FAIL", "leader", f"what answers at {where} is no leader ({err})", "another program has that port"
        )
        return
    except OSError as err:
        why = "does not answer" if isinstance(err, TimeoutError) else err.strerror or os.strerror(err.errno or 0)
        yield finding("FAIL", "leader", f"{where}: {why}", "another program has that port, or the leader is stopped")
        return
    took_s = time.monotonic() - began_s
    yield finding("OK", "leader", f"answers in {took_s * 1e3:.0f} ms{', and has the same token' if token else ''}")
    ahead_s = time.time() - leader_unix_s
    if abs(ahead_s) <= _CLOCK_S + took_s:
        yield finding("OK", "clock", "as the leader's")
    else:
        value = f"{abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} the leader's"
        yield finding("WARN", "clock", value, "times in logs, reports and metrics will not agree: run NTP on all nodes")


def _exchange(sock: socket.socket, token: bytes | None) -> float:
    """Send one message, authenticated if there is a token, and wait for its answer: the leader's clock.

    Raises what says why not.
    """
    sock.settimeout(_TIMEOUT_S)
    lines = sock.makefile("rb")
    auth = Authenticator(token, dialled=True) if token else None
    if auth is not None:
        sock.sendall(encode(Challenge(nonce=auth.nonce)))
        theirs = decode(lines.readline(MAX_LINE_BYTES))
        if not isinstance(theirs, Challenge):
            raise AuthError("gives no token")
        auth.begin(theirs.nonce)
    asked = Beat(number=1)
    line = encode(asked)[:-1]
    sock.sendall((auth.seal(line) if auth is not None else line) + b"\n")
    message: Message | None = None
    while not (isinstance(message, Beat) and message.number == asked.number):
        line = lines.readline(MAX_LINE_BYTES)
        if not line:
            raise EOFError
        message = decode(auth.open(line[:-1]) if auth is not None else line)
        if isinstance(message, Challenge):
            raise AuthError("asks for a token")
    return message.unix_s


def finding(status: str, name: str, value: str, advice: str = "") -> Finding:
    """A line about a step on the way to where the nodes meet."""
    return Finding(name=f"endpoint: {name}", status=Status[status], value=value, advice=advice)
