"""A rank without torch: makes steps together with the others, over TCP at MASTER_ADDR and MASTER_PORT as torch does.

Appends a line of JSON to the file named by $STEPS for each step, and obeys the file `$STEPS.do`: "raise", "exit CODE",
"linger SECONDS" (raise, with connections closed at once and the process that much later), "end" (all ranks end with
success), "pause SECONDS" (in its step). A lost peer is an error in gloo's words. SIGTERM: it ends with $SAVED, if set.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import struct
import sys
import time

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STEPS = os.environ["STEPS"] + f".{os.environ['LOCAL_RANK']}"
STEP_S = 0.05


def peers() -> list[socket.socket]:
    """Rank 0: the connections of all others; the others: that to rank 0.

    Where the agent has a store of torch's at that port, the ranks meet at one that rank 0 writes to a file.
    """
    port = int(os.environ["MASTER_PORT"])
    note = f"meet-{port}" if os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True" else ""
    if RANK == 0:
        with socket.create_server(("", 0 if note else port)) as server:
            if note:
                with open(note + ".new", "w", encoding="ascii") as file:
                    file.write(str(server.getsockname()[1]))
                os.rename(note + ".new", note)
            return [server.accept()[0] for _ in range(WORLD_SIZE - 1)]
    until_s = time.monotonic() + 30
    while True:
        try:
            if note:
                with open(note, encoding="ascii") as file:
                    port = int(file.read())
            return [socket.create_connection((os.environ["MASTER_ADDR"], port), timeout=5)]
        except OSError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.02)


def receive(peer: socket.socket) -> int:
    data = b""
    while len(data) < 4:
        try:
            chunk = peer.recv(4 - len(data))
        except OSError:
            chunk = b""
        if not chunk:
            raise RuntimeError("[gloo/transport/tcp/pair.cc:544] Connection closed by peer [10.77.0.10]:4711")
        data += chunk
    return int(struct.unpack("!i", data)[0])


def step(others: list[socket.socket], value: int) -> int:
    """All ranks give a value, and have the largest: 1 to end."""
    if RANK == 0:
        value = max([value, *(receive(peer) for peer in others)])
    for peer in others:
        try:
            peer.sendall(struct.pack("!i", value))
        except OSError as err:
            raise RuntimeError("[gloo/transport/tcp/pair.cc:544] Connection closed by peer [10.77.0.10]:4711") from err
    return value if RANK == 0 else receive(others[0])


def order() -> list[str]:
    try:
        with open(STEPS + ".do", encoding="ascii") as file:
            words = file.read().split()
        os.unlink(STEPS + ".do")
    except OSError:
        return []
    return words


def main() -> None:
    if "SAVED" in os.environ:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(int(os.environ["SAVED"])))
    others = peers()
    for peer in others:
        peer.settimeout(None)
    number = 0
    with open(STEPS, "a", encoding="ascii") as out:
        while True:
            ends = 0
            match order():
                case ["raise"]:
                    raise ValueError("the loss is not finite")
                case ["linger", seconds]:  # it destroys its process group, and takes its time to end
                    atexit.register(time.sleep, float(seconds))
                    for peer in others:
                        peer.close()
                    raise ValueError("the loss is not finite")
                case ["exit", code]:
                    os._exit(int(code))
                case ["end"]:
                    ends = 1
                case ["pause", seconds]:
                    time.sleep(float(seconds))
            if step(others, ends):
                return
            number += 1
            facts = {
                "at_s": time.monotonic(),
                "step": number,
                "rank": RANK,
                "world_size": WORLD_SIZE,
                "node_rank": int(os.environ["GROUP_RANK"]),
                "attempt": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
                "store": os.environ["MASTER_ADDR"] + ":" + os.environ["MASTER_PORT"],
                "pid": os.getpid(),
            }
            out.write(json.dumps(facts) + "\n")
            out.flush()
            time.sleep(STEP_S)


if __name__ == "__main__":
    sys.exit(main())
