"""What it costs to carry ranks' output: N writers, a million lines in all, through the agent's logs package.

    python benchmarks/logs.py [--ranks 64] [--lines 1000000] [--console pipe|tty|file] [--unbuffered] [--progress]

Writers are separate processes that print lines of about 60 bytes as fast as they can; the console's reader is a process
too. Printed: the agent's CPU seconds per million lines, wall time, peak RSS, and whether every line arrived in its file
and on the console. `--unbuffered` writes each line by a write(2) of its own, as `python -u` does. On a terminal
(`tty`) all ranks say the same lines, so folding has all its work to do.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import tty
from pathlib import Path

from gpulaunch.launcher.job.spec import Std
from gpulaunch.launcher.logs.capture import LogHub
from gpulaunch.launcher.logs.console import Console
from gpulaunch.launcher.loop.loop import Exit, Loop

_WRITER = """
import os, sys
rank, lines, mode = sys.argv[1], int(sys.argv[2]), sys.argv[3]
end = "\\r" if mode == "progress" else "\\n"
text = [f"step {n:07d} rank {rank} loss 2.3456 lr 0.0003 tokens/s 123456{end}".encode() for n in range(lines)]
if mode == "unbuffered":
    for line in text:
        os.write(1, line)
else:
    with open(1, "wb", buffering=8192) as out:
        out.writelines(text)
"""
# Counts a folded line, `[0-3,6] ...`, as often as it was said.
_READER = """
import os, re
seen = []
try:
    while data := os.read(0, 1 << 20):
        seen.append(data)
except OSError:  # EIO: how a pseudo-terminal says that its other side is closed
    pass
seen = b"".join(seen)
folded = re.findall(rb"^(?:\\x1b\\[[0-9]+m)?\\[([0-9,-]*[,-][0-9]+)\\] ", seen, re.M)
runs = [run.split(b"-") for ranks in folded for run in ranks.split(b",")]
print(seen.count(b"\\n"), seen.count(b"\\n") - len(folded) + sum(int(run[-1]) - int(run[0]) + 1 for run in runs))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--console", choices=["pipe", "tty", "file"], default="pipe")
    parser.add_argument("--unbuffered", action="store_true")
    parser.add_argument("--progress", action="store_true", help="carriage returns instead of newlines")
    args = parser.parse_args()
    mode = "progress" if args.progress else "unbuffered" if args.unbuffered else "buffered"
    with tempfile.TemporaryDirectory() as directory:
        result = _measure(Path(directory), args.ranks, args.lines // args.ranks, args.console, mode)
    print(json.dumps(result, indent=2))
    return 0 if result["complete"] else 1


def _measure(directory: Path, ranks: int, lines_each: int, kind: str, mode: str) -> dict[str, object]:
    reader: subprocess.Popen[str] | None = None
    console_file = directory / "console.txt"
    if kind == "file":
        out_fd = os.open(console_file, os.O_WRONLY | os.O_CREAT)
    else:
        read_fd, out_fd = os.openpty() if kind == "tty" else os.pipe()
        if kind == "tty":
            tty.setraw(out_fd)
        command = [sys.executable, "-S", "-c", _READER]
        reader = subprocess.Popen(command, stdin=read_fd, stdout=subprocess.PIPE, text=True)
        os.close(read_fd)

    loop = Loop()
    console = Console(loop, stdout_fd=out_fd, stderr_fd=out_fd)
    hub = LogHub(loop, console)
    running = set[int]()

    def ended(exit_: Exit) -> None:
        running.discard(exit_.pid)
        hub.finish(rank_of[exit_.pid])
        if not running:
            loop.stop()

    idle_rss = _rss_bytes()
    ends: list[tuple[int, int]] = []
    for rank in range(ranks):
        for stream, name in ((Std.OUT, "stdout"), (Std.ERR, "stderr")):
            path = str(directory / f"{name}-{rank}.log")
            ends.append((rank, hub.open(rank=rank, local_rank=rank, stream=stream, path=path, show=True)))
    rank_of: dict[int, int] = {}
    started_s, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
    said_as = ["same" if kind == "tty" else str(rank) for rank in range(ranks)]
    for rank in range(ranks):
        stdout_fd, stderr_fd = (fd for owner, fd in ends if owner == rank)
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-S", "-c", _WRITER, said_as[rank], str(lines_each), mode],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, stdout_fd, 1), (os.POSIX_SPAWN_DUP2, stderr_fd, 2)],
            setsigdef=[signal.SIGPIPE],
        )
        rank_of[pid] = rank
        running.add(pid)
        loop.watch_pid(pid, ended)
    for _, fd in ends:
        os.close(fd)
    loop.run()
    console.flush(30.0)
    wall_s, after = time.monotonic() - started_s, resource.getrusage(resource.RUSAGE_SELF)
    hub.close()
    console.close()
    os.close(out_fd)
    loop.close()
    if reader is not None:
        console_lines, said_lines = map(int, reader.communicate()[0].split())
    else:
        console_lines = said_lines = console_file.read_bytes().count(b"\n")

    end = b"\r" if mode == "progress" else b"\n"
    file_lines = sum((directory / f"stdout-{rank}.log").read_bytes().count(end) for rank in range(ranks))
    written = ranks * lines_each
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    all_said = said_lines == written or mode == "progress"  # of a progress bar, the last state is enough
    return {
        "ranks": ranks,
        "lines": written,
        "mode": mode,
        "console": kind,
        "agent_cpu_s_per_million_lines": round(cpu_s / written * 1e6, 3),
        "agent_user_cpu_s": round(after.ru_utime - before.ru_utime, 3),
        "wall_s": round(wall_s, 3),
        "lines_per_s": round(written / wall_s),
        "console_lines": console_lines,
        "file_lines": file_lines,
        "rss_before_mb": round(idle_rss / 1e6, 1),
        "peak_rss_mb": round(after.ru_maxrss * 1024 / 1e6, 1),
        "complete": file_lines == written and all_said,
    }


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main())
