"""Where etcd is, and as whom it is asked. Values only; `etcd_client` loads what talks to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpulaunch.launcher.rendezvous.base import RendezvousError
from gpulaunch.launcher.rendezvous.listen import format_address

if TYPE_CHECKING:
    import ssl


@dataclass(frozen=True, kw_only=True)
class Access:
    """How to reach etcd, and where in it the nodes meet."""

    endpoints: tuple[tuple[str, int], ...]
    tls: bool = False
    cacert: str = ""
    """File with the certificates to trust; "": the system's."""
    cert: str = ""
    """Files with this client's own certificate and key."""
    key: str = ""
    user: str = ""
    password: str = field(default="", repr=False)
    prefix: str = "/gpulaunch"
    """Of all keys."""

    def context(self) -> ssl.SSLContext | None:
        """For TLS. Raises RendezvousError for files that cannot be used."""
        if not self.tls:
            return None
        import ssl  # only for TLS

        try:
            context = ssl.create_default_context(cafile=self.cacert or None)
            if self.cert:
                context.load_cert_chain(self.cert, self.key or None)
        except (OSError, ssl.SSLError) as err:
            raise RendezvousError(f"--rdzv-conf: cacert, cert or key cannot be used: {err}") from err
        return context

    def __str__(self) -> str:
        return ",".join(format_address(host, port) for host, port in self.endpoints)


def read_password(path: str) -> str:
    """The password in a file, without the end of its line; "" for the path "". Raises RendezvousError."""
    if not path:
        return ""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().rstrip("\r\n")
    except (OSError, UnicodeError) as err:
        why = getattr(err, "strerror", None) or "not UTF-8"
        raise RendezvousError(f"--rdzv-conf: password_file: cannot read {path}: {why}") from err
