"""A blocking client of etcd v3: its JSON gateway over HTTP or TLS, by any member of a list that answers.

Only for threads of their own: a request may take several seconds. `/v3/` is what etcd 3.4 and later serve.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import socket
import ssl
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpulaunch.launcher.rendezvous.codec import clean
from gpulaunch.launcher.rendezvous.etcd_access import Access
from gpulaunch.launcher.rendezvous.listen import format_address, is_loopback, resolve

TRY_S = 1.5
"""How long one member may take; an election of a new leader takes one to two seconds."""
WATCH_S = 60.0
"""After so long without an event a watch begins anew: the member may be gone without a word."""
NOT_FOUND = 5
_UNKNOWN, _INVALID, _DENIED, _FAILED, _UNAUTHENTICATED = 2, 3, 7, 9, 16
_AWAY = (1, _UNKNOWN, 4, 14)
"""Codes of gRPC that say that this member cannot answer now: cancelled, unknown, deadline exceeded, unavailable."""
_MAX_ANSWER_BYTES = 64 << 20


class EtcdError(Exception):
    """etcd refuses a request; `code` is gRPC's."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code

    @property
    def is_final(self) -> bool:
        """Whether there is no point in asking again: who asks is refused."""
        return self.code in (_UNKNOWN, _INVALID, _DENIED, _FAILED, _UNAUTHENTICATED)


class EtcdAwayError(EtcdError):
    """No member has answered the request; it may still be carried out."""

    def __init__(self, text: str, *, no_majority: bool) -> None:
        super().__init__(text)
        self.no_majority = no_majority
        """So many members say that they have no leader, or do not run, that no others could have one."""


def encoded(text: str | bytes) -> str:
    """A key or a value as the gateway takes it."""
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode("ascii")


def decoded(text: str) -> bytes:
    """A key or a value as the gateway gives it."""
    return base64.b64decode(text)


def under(prefix: str) -> dict[str, str]:
    """The range of all keys that begin so."""
    return {"key": encoded(prefix), "range_end": encoded(prefix[:-1] + chr(ord(prefix[-1]) + 1))}


class EtcdClient:
    """One connection at a time, to a member that has a leader."""

    def __init__(self, access: Access, context: ssl.SSLContext | None = None) -> None:
        """`context`: of `access.context()`."""
        self._access = access
        self._context = context
        self._at = 0
        self._connection: http.client.HTTPConnection | None = None
        self._token = ""
        self._own_addr = ""
        self.versions: dict[tuple[str, int], str] = {}
        """Of the members that have answered."""
        self._ids: dict[tuple[str, int], str] = {}
        """The members that have answered at these endpoints."""
        self._members = 0
        """How many the cluster has; 0: not known."""

    @property
    def endpoint(self) -> tuple[str, int]:
        """Of the member that is asked."""
        return self._access.endpoints[self._at]

    def local_addr(self) -> str:
        """The address of this machine at which others reach it: from which it reaches etcd, if that is elsewhere."""
        sock = self._connection.sock if self._connection is not None else None
        own = str(sock.getsockname()[0]).removeprefix("::ffff:") if sock is not None else ""
        if own and not is_loopback(own):
            return own
        elsewhere = [
            *self._access.endpoints,
            ("192.0.2.1", 9),
        ]  # the last belongs to no host (RFC 5737): the default route
        for host, port in elsewhere if not self._own_addr else ():
            with contextlib.suppress(OSError):
                ((family, where), *_) = resolve(host, port)
                with socket.socket(family, socket.SOCK_DGRAM) as trial:
                    trial.connect(where)  # sends nothing
                    address = str(trial.getsockname()[0]).removeprefix("::ffff:")
                if not is_loopback(address):
                    self._own_addr = address
                    break
        return self._own_addr or own

    def call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Ask the member that answered last; if it does not, one that has a leader. Raises EtcdError."""
        try:
            return self._authenticated(path, body)
        except EtcdAwayError as err:
            trouble = str(err)
        standing = [self._standing(number) for number in self._others_first()]
        for number, stands in zip(self._others_first(), standing, strict=True):
            if stands == "leads":
                self._drop()
                self._at = number
                with contextlib.suppress(EtcdAwayError):
                    return self._authenticated(path, body)
        idle = {
            self._ids[self._access.endpoints[number]]
            for number, stands in zip(self._others_first(), standing, strict=True)
            if stands in ("no leader", "not running") and self._access.endpoints[number] in self._ids
        }
        self._at = (self._at + 1) % len(self._access.endpoints)
        quorum = self._members // 2 + 1
        raise EtcdAwayError(trouble, no_majority=0 < self._members < quorum + len(idle))

    def num_members(self) -> int:
        """How many the cluster has. Raises EtcdError."""
        return len(self.call("cluster/member/list", {})["members"])

    def learn_members(self) -> None:
        """Remember who is behind each endpoint: later, not to answer says something of that member."""
        self._members = self.num_members()
        for number in range(len(self._access.endpoints)):
            self._standing(number)

    def standings(self) -> list[str]:
        """Of each endpoint: leads (or follows one who does), no leader, not running, silent."""
        return [self._standing(number) for number in range(len(self._access.endpoints))]

    def close(self) -> None:
        """End the connection."""
        self._drop()

    def watch(self, ranges: Sequence[Mapping[str, str]]) -> Iterator[None]:
        """An item for each change in one of these ranges, until the connection ends. Raises EtcdError."""
        asked = "".join(json.dumps({"create_request": {**each}}) for each in ranges)
        connection = self._connect(self.endpoint)
        self._connection = connection
        try:
            connection.connect()
            connection.sock.settimeout(WATCH_S)
            connection.request("POST", "/v3/watch", asked, self._headers())
            response = connection.getresponse()
            while line := response.readline():
                if b'"events"' in line:
                    yield
        except (
            OSError,
            http.client.HTTPException,
            ValueError,
            AttributeError,
        ) as err:  # Attribute...: closed meanwhile
            raise EtcdAwayError(str(err), no_majority=False) from err
        finally:
            self._drop()

    def follow(self, other: EtcdClient) -> None:
        """Use the member and the token of another client."""
        self._at, self._token = other._at, other._token

    def interrupt(self) -> None:
        """End a watch, from another thread."""
        connection = self._connection
        sock = connection.sock if connection is not None else None
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    # -- one member

    def _others_first(self) -> list[int]:
        number = len(self._access.endpoints)
        return [(self._at + 1 + offset) % number for offset in range(number)]

    def _standing(self, number: int) -> str:
        where = self._access.endpoints[number]
        connection = self._connect(where)
        try:
            answer = self._exchange(connection, "maintenance/status", {})
        except ConnectionRefusedError:
            return "not running"
        except EtcdError:  # it answers, but not this: it may have a leader
            return "leads"
        except (OSError, http.client.HTTPException, ValueError):
            return "silent"
        finally:
            connection.close()
        self.versions[where] = clean(str(answer.get("version", "")))
        self._ids[where] = str(answer.get("header", {}).get("member_id", ""))
        return "leads" if answer.get("leader", "0") != "0" else "no leader"

    def _authenticated(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        if self._access.user and not self._token:
            self._authenticate()
        try:
            return self._ask(path, body)
        except EtcdError as err:
            if err.code != _UNAUTHENTICATED or not self._access.user:
                raise
        self._authenticate()  # tokens expire
        return self._ask(path, body)

    def _authenticate(self) -> None:
        self._token = ""
        answer = self._ask("auth/authenticate", {"name": self._access.user, "password": self._access.password})
        self._token = str(answer["token"])

    def _ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        fresh = self._connection is None
        if self._connection is None:
            self._connection = self._connect(self.endpoint)
        try:
            return self._exchange(self._connection, path, body)
        except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError) as err:
            self._drop()  # it may only have been idle for too long, or its member was started anew
            if fresh:
                raise self._away(err) from err
            return self._ask(path, body)
        except (OSError, http.client.HTTPException, ValueError) as err:
            self._drop()
            raise self._away(err) from err
        except EtcdError as err:
            if err.code in _AWAY:
                raise self._away(err) from err
            raise

    def _away(self, err: Exception) -> EtcdAwayError:
        why = "no answer" if isinstance(err, TimeoutError) else getattr(err, "strerror", None) or str(err)
        return EtcdAwayError(f"{format_address(*self.endpoint)}: {clean(str(why))}", no_majority=False)

    def _connect(self, where: tuple[str, int]) -> http.client.HTTPConnection:
        if self._context is not None:
            return http.client.HTTPSConnection(*where, timeout=TRY_S, context=self._context)
        return http.client.HTTPConnection(*where, timeout=TRY_S)

    def _exchange(self, connection: http.client.HTTPConnection, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        connection.request("POST", f"/v3/{path}", json.dumps(body), self._headers())
        response = connection.getresponse()
        data = response.read(_MAX_ANSWER_BYTES)
        answer: Any = json.loads(data)
        if not isinstance(answer, dict):
            raise EtcdError("what answers there is not etcd", _UNKNOWN)
        failed: Any = answer.get("error")
        if isinstance(failed, dict):  # in a stream
            raise EtcdError(clean(str(failed.get("message"))), int(failed.get("grpc_code", _UNKNOWN)))
        if response.status != http.client.OK or failed:
            text = clean(str(answer.get("message") or failed or f"HTTP {response.status}"))
            raise EtcdError(text, int(answer.get("code", _UNKNOWN)))
        return answer

    def _headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json"} | ({"Authorization": self._token} if self._token else {})

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
