"""A node of many ranks and a few GPUs that never was: what they would have published, written by the real writers.

Not a test: `python many_ranks.py DIRECTORY COUNT` plays the agent of a run and starts a process for each rank. Time
passes as it does; what a step consists of is made up. It does what it is told, one line at a time, and answers each:

    healthy        the steps take 50 ms, hardly any of it for data
    slow-loader    every rank waits as long again for its data
    slow-rank      rank SLOW works 30 ms longer by itself, and all others wait for it
    restart        the ranks are killed, and others begin the next attempt
"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "badluck"))
sys.path.insert(0, str(Path(__file__).parents[1] / "sidecar"))

from bad_node import step
from toy_rank import save

from gpulaunch.profiler.channel import collectives, layout, page, workers
from gpulaunch.profiler.channel.layout import Hook, Word

MS = 1_000_000
MIB = 1 << 20
SLOW = 13
GPUS = 8
PACE_S = 0.25
MODES = ("healthy", "slow-loader", "slow-rank")
HEALTHY = {"data_wait": 1, "forward": 15, "backward": 22, "comm": 4, "optimizer": 5, "sync": 1, "other": 2}


def parts_of(mode: str, rank: int) -> dict[str, int]:
    """What a step of a rank consists of, in nanoseconds by phase."""
    parts = dict.fromkeys(layout.PHASES, 0) | {phase: amount * MS for phase, amount in HEALTHY.items()}
    if mode == "slow-loader":
        parts["data_wait"] += 50 * MS
    elif mode == "slow-rank":
        parts["forward" if rank == SLOW else "comm"] += 30 * MS
    return parts


class Rank:
    """One rank, in a process of its own."""

    def __init__(self, directory: str, rank: int, attempt: int, mode: mmap.mmap) -> None:
        self.rank = rank
        self.mode = mode
        self.writer = page.PageWriter(f"{directory}/rank-{rank}.bin")
        file = f"{directory}/workers-{rank}.bin"
        workers.own(file)
        self.worker = workers.WorkersWriter(
            file, parent_pid=os.getpid(), worker=0, knows=workers.KNOWS_RUNQUEUE | workers.KNOWS_IO
        )
        self.calls = collectives.open_new(f"{directory}/collectives-{rank}.bin", attempt=attempt)
        self.calls[collectives.RECORDER] = collectives.TELLS
        words = self.writer.words
        words[Word.BUDGET_PPM] = 10_000
        words[Word.RESUMED_STEP] = 100 * attempt
        if rank == 2:  # so that the tables of such parts have something to show
            words[Word.HOOKS_SHED] = Hook.SAMPLES
            words[Word.HOOKS_UNAVAILABLE] = Hook.GPU_MEMORY_FRACTION
        self.left_ns = 0

    def run(self) -> None:
        before_ns = time.monotonic_ns()
        while True:
            select.select((), (), (), PACE_S)
            now_ns = time.monotonic_ns()
            self.left_ns += now_ns - before_ns
            before_ns = now_ns
            self.work(parts_of(MODES[self.mode[0]], self.rank))

    def work(self, parts: dict[str, int]) -> None:
        """Make as many steps as there was time for."""
        step_ns = sum(parts.values())
        count, self.left_ns = divmod(self.left_ns, step_ns)
        if not count:
            return
        words = self.writer.words
        step(self.writer, count, parts)
        words[Word.PROBE_NS_TOTAL] += count * 20_000
        self._load(count, parts["data_wait"])
        self._pause(count)
        self._use_gpu(count)
        self._meet(count)
        words[Word.UNOBSERVED_STEPS] = words[Word.STEPS] // 20
        words[Word.PRICED_PAIRS] = words[Word.STEPS] // 40
        words[Word.PAIRED_COST_NS], words[Word.PAIRED_ERROR_NS] = 30_000, 8_000
        words[Word.SKIPPED_STEPS] = words[Word.STEPS] // 100
        if words[Word.STEPS] // 40 > words[Word.CHECKPOINT_SAVES]:
            save(self.writer, words[Word.STEPS])

    def _load(self, count: int, wait_ns: int) -> None:
        words = self.writer.words
        words[Word.LOADER_BATCHES] += count
        words[Word.LOADER_BATCH_BYTES_TOTAL] += count * MIB
        words[Word.LOADER_WAIT_NS_TOTAL] += count * wait_ns
        words[Word.LOADER_TRANSFER_NS_TOTAL] += count * MS // 2
        words[Word.LOADER_BLOCKED_NS_TOTAL] += count * MS // 10
        bucket = sum(wait_ns > bound_ns for bound_ns in layout.STEP_BOUNDS_NS)
        words[Word.LOADER_WAIT_HISTOGRAM + bucket] += count
        slow = wait_ns > 10 * MS
        self.writer.write_queue((1, 2, 0 if slow else 2, 0, 0))
        fetch_ns = (50 if slow else 20) * MS
        blocked_ns = fetch_ns - 12 * MS
        self.worker.add(
            (
                *(count, 32 * count),
                *(count * fetch_ns, count * 10 * MS, count * 2 * MS, count * blocked_ns, count * MS),
                *(count * MIB, count * MIB // 4),
            )
        )

    def _pause(self, count: int) -> None:
        words = self.writer.words
        words[Word.GC_COLLECTIONS] += count
        words[Word.GC_PAUSE_NS_TOTAL] += count * MS // 50
        words[Word.COMPILES] = 3
        words[Word.COMPILE_PAUSE_NS_TOTAL] = 900 * MS
        words[Word.COMM_CALLS] += count
        words[Word.COMM_BLOCKED_NS_TOTAL] += count * 4 * MS
        words[Word.DDP_COMM_NS], words[Word.DDP_OVERLAP_NS] = 6 * MS, 4 * MS

    def _use_gpu(self, count: int) -> None:
        words = self.writer.words
        for word, amount in (
            (Word.GPU_ALLOCATED_BYTES, 900 * MIB),
            (Word.GPU_PEAK_ALLOCATED_BYTES, 1000 * MIB),
            (Word.GPU_RESERVED_BYTES, 1200 * MIB),
            (Word.GPU_PEAK_RESERVED_BYTES, 1300 * MIB),
            (Word.GPU_ACTIVE_BYTES, 920 * MIB),
            (Word.GPU_INACTIVE_SPLIT_BYTES, 100 * MIB),
            (Word.GPU_PINNED_BYTES, 64 * MIB),
        ):
            words[word] = amount
        for word, amount in (
            (Word.GPU_TIMED_STEPS, 1),
            (Word.GPU_STEP_NS_TOTAL, 44 * MS),
            (Word.GPU_FORWARD_NS_TOTAL, 14 * MS),
            (Word.GPU_BACKWARD_NS_TOTAL, 25 * MS),
            (Word.GPU_OPTIMIZER_NS_TOTAL, 5 * MS),
        ):
            words[word] += amount
        for index, size_bytes in enumerate((MIB // 2, MIB, 4, 4096, MIB)):
            at = Word.COPY_FIRST + index * layout.COPY_WORDS
            for word, amount in enumerate((count, count * size_bytes, count * MS // 10, count * MS // 5)):
                words[at + word] += amount
        for index in range(len(layout.SYNCS)):
            words[Word.SYNC_FIRST + index * layout.SYNC_WORDS] += count
            words[Word.SYNC_FIRST + index * layout.SYNC_WORDS + 1] += count * MS // 10

    def _meet(self, count: int) -> None:
        counter, running, returned = collectives.words_of_call("all_reduce")
        self.calls[counter] += count
        self.calls[collectives.ENQUEUED] += 2 * count
        self.calls[collectives.COMPLETED] = self.calls[collectives.ENQUEUED] - (self.rank % 2)
        self.calls[collectives.SEQUENCE] += 2 * count
        self.calls[collectives.CALL] = running if self.rank % 8 else returned


class Agent:
    """Starts the ranks, and says what an agent says."""

    def __init__(self, directory: str, count: int) -> None:
        self.directory = directory
        self.count = count
        self.mode = mmap.mmap(-1, 1)
        self.pids: list[int] = []
        self.attempt = -1
        self.began_s = time.monotonic()
        self.restarts = 0
        self.lost_s = 0.0

    def put(self, name: str, content: object) -> None:
        draft = f"{self.directory}/{name}.draft"
        with open(draft, "w") as file:
            json.dump(content, file)
        os.rename(draft, f"{self.directory}/{name}")

    def start(self) -> None:
        """Begin an attempt."""
        self.attempt += 1
        for rank in range(self.count):
            page.create(f"{self.directory}/rank-{rank}.bin", rank=rank, local_rank=rank, attempt=self.attempt)
            workers.create(f"{self.directory}/workers-{rank}.bin")
            device = {"uuid": f"GPU-{rank % GPUS}"}
            self.put(f"facts-{rank}.json", {"version": 1, "device": device})
        ready, done = os.pipe()
        for rank in range(self.count):
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                mine = Rank(self.directory, rank, self.attempt, self.mode)
                os.write(done, b"x")
                mine.run()
            self.pids.append(pid)
        for _ in range(self.count):
            os.read(ready, 1)
        os.close(ready)
        os.close(done)
        places = [{"rank": rank, "local_rank": rank, "pid": pid} for rank, pid in enumerate(self.pids)]
        group = {"version": 1, "run_id": "0123456789abcdef", "name": "many", "attempt": self.attempt, "ranks": places}
        self.put("group.json", {**group, "world_size": self.count, "node_rank": 0, "run_dir": f"{self.directory}/.."})

    def stop(self) -> None:
        """End all ranks."""
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
        for pid in self.pids:
            os.waitpid(pid, 0)
        self.pids = []

    def account(self) -> None:
        """Tell where the time went."""
        ran_s = time.monotonic() - self.began_s
        spent = {"startup": 0.5, "checkpoint_stall": 0.02 * ran_s, "lost_work": self.lost_s, "restart": self.lost_s}
        goodput = {**spent, "productive": max(0.0, ran_s - sum(spent.values()))}
        restarts = {"exception": self.restarts} if self.restarts else {}
        account = {"version": 1, "restarts": restarts, "goodput_seconds": goodput}
        self.put("run.json", {**account, "hang_suspicions": 0, "hangs": 0, "preempted": 0})

    def obey(self, order: str) -> None:
        """Do what a line says."""
        if order == "restart":
            self.stop()
            self.restarts += 1
            self.lost_s += 2.0
            self.account()
            self.start()
        else:
            self.mode[0] = MODES.index(order)

    def run(self) -> None:
        """Obey until there are no orders any more."""
        self.account()
        self.start()
        print("ok", flush=True)
        orders = b""
        while True:
            if select.select([0], (), (), PACE_S)[0]:
                if not (read := os.read(0, 4096)):
                    return
                *lines, orders = (orders + read).split(b"\n")
                for line in lines:
                    self.obey(line.decode())
                    print("ok", flush=True)
            self.account()


def main(directory: str, count: int) -> None:
    agent = Agent(directory, count)
    try:
        agent.run()
    finally:
        agent.stop()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
