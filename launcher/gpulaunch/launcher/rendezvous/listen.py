"""Listening sockets for the store of a job: bound before anything is started, so that no port can be lost to a race."""

from __future__ import annotations

import contextlib
import errno
import os
import socket

from gpulaunch.launcher.rendezvous.base import PortInUseError, RendezvousError

# As torch's own TCPStore: all ranks connect at once, and a rank beyond the backlog waits a second for its next SYN.
BACKLOG = 2048


Address = tuple[socket.AddressFamily, tuple[object, ...]]


def format_address(host: str, port: int) -> str:
    """An address as `host:port` text."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve(host: str, port: int, *, numeric: bool = False) -> list[Address]:
    """The addresses of `host` and `port`, in the resolver's order; blocks, unless `numeric`. Raises OSError."""
    # Given as bytes, an ASCII name does not make Python load its IDNA tables.
    name = host.encode("ascii") if host.isascii() else host
    try:
        flags = socket.AI_NUMERICHOST if numeric else 0
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=flags)
    except UnicodeError as err:
        raise OSError(errno.EINVAL, "not a host name") from err
    # dict.fromkeys: a name listed twice in /etc/hosts appears twice.
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def is_loopback(host: str) -> bool:
    """Whether a name or address stays on this machine by what it says, without a look-up."""
    return host in ("localhost", "::1") or host.startswith("127.")


def interface_of(address: str) -> str:
    """The name of the network interface that has an address, other than the loopback's; "" if none has."""
    if not address or is_loopback(address):
        return ""
    import psutil  # only for jobs of several nodes

    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return str(name)
    return ""


def listen(host: str, port: int, *, others: bool = False) -> socket.socket:
    """Make a non-blocking listening socket that clients of `host` and `port` reach; port 0: any free one.

    Bound only to what `host` means on this machine: "localhost" is never reachable from outside. IPv4 before IPv6,
    because a loopback name often means both and torch's clients try every address of a name.

    `others`: clients come from other machines, for which `host` may mean something else than here: a service address,
    a NAT, a name not known yet, or the machine's own name, which Debian maps to 127.0.1.1. Then it listens on all
    addresses.

    Raises RendezvousError; PortInUseError with the holder of the port if that can be seen.
    """
    try:
        addresses = resolve(host, port)
    except OSError as err:
        if not others:
            why = err.strerror or str(err)
            raise RendezvousError(f"master address {host} cannot be resolved ({why}); check the name") from err
        addresses = []
    addresses.sort(key=lambda item: item[0] != socket.AF_INET)
    refusal: OSError | None = None
    anywhere = others and (not addresses or _is_own_name_only(host, addresses))
    for family, address in () if anywhere else addresses:
        try:
            return _listening(family, address)
        except OSError as err:
            # The user needs to see a port in use more than a missing IPv6.
            if refusal is None or err.errno == errno.EADDRINUSE:
                refusal = err
    if anywhere or (others and refusal is not None and refusal.errno == errno.EADDRNOTAVAIL):
        try:
            return _listen_anywhere(port)
        except OSError as err:
            refusal = err
    in_use = refusal is not None and refusal.errno == errno.EADDRINUSE
    raise (PortInUseError if in_use else RendezvousError)(_refused(host, port, refusal)) from refusal


def _is_own_name_only(host: str, addresses: list[Address]) -> bool:
    """Whether `host` is a name that means loopback on this machine alone, other than "localhost"."""
    numbers = [str(address[0]) for _, address in addresses]
    return (
        all(number == "::1" or number.startswith("127.") for number in numbers)
        and host not in numbers
        and host.rpartition(".")[2] != "localhost"
    )


def _listening(family: int, address: tuple[object, ...], *, dual: bool = False) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        # Connections of the last job that linger in TIME_WAIT must not keep this one from its port. Linux still
        # refuses if there is a listener.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if dual else 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def _listen_anywhere(port: int) -> socket.socket:
    """Listen on all addresses, IPv6 and IPv4 in one socket if the machine has IPv6."""
    try:
        return _listening(socket.AF_INET6, ("::", port), dual=True)
    except OSError as err:
        if err.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            raise
        return _listening(socket.AF_INET, ("0.0.0.0", port))  # noqa: S104  # the ranks of other nodes arrive here


def _refused(host: str, port: int, refusal: OSError | None) -> str:
    if refusal is not None and refusal.errno == errno.EADDRINUSE:
        holder = holder_of(port)
        by = f" by {holder}" if holder else ""
        return f"port {port} on {host} is in use{by}; end that, or choose another with --master-port"
    if refusal is not None and refusal.errno == errno.EACCES:
        return f"port {port} on {host} is reserved for root; choose one above 1023 with --master-port"
    if refusal is not None and refusal.errno == errno.EADDRNOTAVAIL:
        return f"master address {host} is not an address of this machine; check --master-addr"
    reason = os.strerror(refusal.errno or 0) if refusal is not None else "no address"
    return f"cannot listen on {format_address(host, port)}: {reason}"


def holder_of(port: int) -> str | None:
    """The process listening on `port`, as "process 123 (python)"; None if /proc does not show it (another user's)."""
    inodes = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    if not inodes:
        return None
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            for fd in os.listdir(f"/proc/{pid}/fd"):
                if os.readlink(f"/proc/{pid}/fd/{fd}") in inodes:
                    return f"process {pid} ({_name_of(pid)})"
    return None


def _listening_inodes(port: int) -> list[str]:
    """Inodes of the sockets in state LISTEN (0A) on `port`, from the kernel's tables (proc(5))."""
    inodes: list[str] = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table, encoding="ascii") as lines:  # no IPv6: no table
            next(lines, None)
            for line in lines:
                fields = line.split()
                if len(fields) > 9 and fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.append(fields[9])
    return inodes


def _name_of(pid: str) -> str:
    with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as comm:
        return comm.read().strip()


def is_here(addr: str, port: int) -> bool:
    """Whether an address is one of this machine's; a name that is not in the DNS yet is by its first part."""
    name = os.uname().nodename
    if addr == name:
        return True
    try:
        addresses = resolve(addr, port)
    except OSError:
        return addr.partition(".")[0] == name.partition(".")[0]
    if any(is_loopback(str(address[0])) for _, address in addresses):
        return True
    for family, address in addresses:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as trial:
            trial.connect((address[0], port or 1))  # sends nothing: the kernel looks for a way
            if trial.getsockname()[0] == address[0]:
                return True
    return False
