"""What the doctor says of the leader's clock; the other steps are in tests/multinode, on hosts of their own."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from gpulaunch.launcher.cli.doctor import reach
from gpulaunch.launcher.rendezvous.messages import Beat, encode


@pytest.mark.parametrize(
    ("ahead_s", "status", "value"),
    [(0.0, "ok", "as the leader's"), (100.0, "warn", "100 s behind the leader's"), (-7.0, "warn", "7 s ahead of")],
)
def test_the_clock_of_the_leader(ahead_s: float, status: str, value: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            sock, _ = server.accept()
            with sock:
                sock.recv(4096)
                sock.sendall(encode(Beat(number=1, unix_s=time.time() + ahead_s)))

        thread = threading.Thread(target=answer)
        thread.start()
        findings = reach(f"127.0.0.1:{server.getsockname()[1]}", "")
        thread.join()

    (clock,) = (each for each in findings if each.name == "endpoint: clock")
    assert clock.status.value == status
    assert value in clock.value
