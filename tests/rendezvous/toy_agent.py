"""A node in a process of its own: does what its stdin says, writes what it hears to stdout, a JSON list a line."""

from __future__ import annotations

import json
import os
import sys

from gpulaunch.launcher.loop.loop import Loop
from gpulaunch.launcher.rendezvous.base import RendezvousError
from gpulaunch.launcher.rendezvous.connection import Pace
from gpulaunch.launcher.rendezvous.static import StaticRendezvous


def say(*words: object) -> None:
    print(json.dumps(words), flush=True)


def main() -> None:
    options = json.loads(sys.argv[1])
    options["pace"] = Pace(**options.get("pace", {}))
    loop = Loop()
    try:
        rendezvous = StaticRendezvous(loop, **options)
    except RendezvousError as err:
        say("error", str(err))
        return
    rendezvous.on_joined = lambda world: say("joined", world.attempt, world.first_rank, world.world_size)
    rendezvous.on_failed = lambda why: say("failed", why)
    rendezvous.on_peer_failed = lambda final, why: say("peer failed", final, why)
    rendezvous.on_node_lost = lambda why: say("peer failed", True, why)
    rendezvous.on_peers_done = lambda: say("done")

    def obey() -> None:
        for line in os.read(0, 4096).decode().splitlines() or ["leave"]:
            word, _, number = line.partition(" ")
            if word == "join":
                rendezvous.join(int(number))
            elif word == "leave":
                loop.stop()
            else:
                rendezvous.tell(ok=word == "ok", final=word == "give-up", why="rank 5 failed")

    loop.watch_read(0, obey)
    say("listening", rendezvous.master_port)
    loop.run()
    rendezvous.close()
    loop.close()


main()
