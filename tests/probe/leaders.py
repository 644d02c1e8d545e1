"""The nursery of programs that others lead: their package is imported once, and each program is a forked rank.

Not a test module: `python leaders.py` reads lines of module, program, backend, directory, environment; it answers with
exit codes. What the program tells of itself is in the directory then, in `told.json`.
"""

from __future__ import annotations

import atexit
import dataclasses
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from diary import Diary

Program = Callable[[Diary], dict[str, Any]]


def tell(program: Program, path: str) -> None:
    """Run a program, and write down what it says, and what was compiled."""
    from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics

    torch._dynamo.reset()
    clear_compilation_metrics()
    counters.clear()
    diary = Diary()
    told = program(diary) | diary.told()
    told["compiled"] = {
        "graph_breaks": dict(counters["graph_break"]),
        "graphs": counters["stats"]["unique_graphs"],
        "frames": [[frame.co_name, str(frame.compile_id)] for frame in get_compilation_metrics()],
    }
    with open(path, "w") as file:
        json.dump(told, file)


def as_a_script(program: Program) -> None:
    """Run a program as this rank of a job. Its page goes with the job, so it reads it itself, at the end."""
    from gpulaunch.profiler.channel import segment

    rank = os.environ["RANK"]
    tell(program, f"told-{rank}.json")
    seen = dataclasses.asdict(segment.read(os.path.join(os.environ["GPULAUNCH_CHANNEL_DIR"], f"rank-{rank}.bin")))
    counts = {name: seen[name] for name in ("steps", "microsteps", "samples", "skipped_steps", "fault", "phase_ns")}
    with open(f"seen-{rank}.json", "w") as file:
        json.dump(counts | {"pid": os.getpid()}, file)


def run(module: str, program: str, backend: str, directory: str) -> int:
    """Run a program as the rank that the environment names; its exit code."""
    from gpulaunch.profiler.probe.inject import arm

    try:
        torch.set_num_threads(1)  # not before the fork: several autograd threads may then find no thread pool
        arm()
        for name in ("RANK", "LOCAL_RANK"):  # to those who lead this is one process, and no job
            del os.environ[name]
        lead = vars(sys.modules[module])[program]
        tell(lambda diary: lead(diary, backend, directory), f"{directory}/told.json")
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def nursery() -> None:
    importlib.import_module("torch._dynamo")  # else 1.4 s in each of them
    for line in sys.stdin:
        module, program, backend, directory, extra = line.rstrip("\n").split("\t")
        importlib.import_module(module)
        pid = os.fork()
        if pid == 0:
            out = os.open(f"{directory}/out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
            os.environ.update(RANK="3", LOCAL_RANK="1", GPULAUNCH_CHANNEL_DIR=directory)
            os.environ.update(dict(pair.split("=", 1) for pair in extra.split()))
            code = run(module, program, backend, directory)
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    nursery()
