"""A node of many ranks and a few GPUs that never was: what they would have published, written by the real writers.

Not a test: `python many_ranks.py DIRECTORY COUNT` plays the agent of a run and starts a process for each rank. Time
passes as it does; what a step consists of is made up. It does what it is told, one line at a time, and answers each:

    healthy        the steps take 50 ms, hardly any of it for data
    slow-loader    every rank waits as long again for its data
    slow-rank      rank SLOW works 30 ms longer by itself, and all others wait for it
    trouble        everything else at once: copies out of pageable memory, syncs, pauses and saves at every step; GPU
                   memory in pieces, allocations and saves that fail, steps that do not count; rank SLOW has much
                   memory; rank LEFT stands still, without its probe, and the others wait inside of a collective; the
                   probe costs more than it may, and in rank ODD parts of it are off; the agent has found a hang, loses
                   work, and was asked to end; a file `trouble` in the directory, for what the sidecar sees then
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

from bad_node import step

from gpulaunch.profiler.channel import collectives, layout, segment_writer, workers
from gpulaunch.profiler.channel.layout import Hook, StepSource, Word
from gpulaunch.profiler.channel.quantities import (
    COPY_WORDS,
    SYNC_WORDS,
    CheckpointState,
    GpuMemory,
    GpuTime,
    LoaderState,
    Pauses,
    StepTotals,
)

MS = 1_000_000
MIB = 1 << 20
SLOW = 13
LEFT = 41
ODD = 2
GPUS = 8
PACE_S = 0.25
MODES = ("healthy", "slow-loader", "slow-rank", "trouble")
HOARD_BYTES = 256 * MIB
SPIN_S = 0.02
"""What rank ODD computes besides in trouble, each time that it wakes."""
SAVE_STEPS = 40
HEALTHY = {
    "data_wait": 1,
    "forward": 15,
    "backward": 22,
    "comm": 4,
    "optimizer": 5,
    "sync": 1,
    "checkpoint": 1,
    "other": 1,
}
IN_TROUBLE = {"h2d": 12, "sync": 12, "checkpoint": 10, "compile": 8, "gc": 8}
"""How many milliseconds a step consists of, by phase; and how many more in trouble: 100 in all."""


def parts_of(mode: str, rank: int) -> dict[str, int]:
    """What a step of a rank consists of, in nanoseconds by phase."""
    parts = dict.fromkeys(layout.PHASES, 0) | {phase: amount * MS for phase, amount in HEALTHY.items()}
    if mode == "slow-loader":
        parts["data_wait"] += 50 * MS
    elif mode == "slow-rank":
        parts["forward" if rank == SLOW else "comm"] += 30 * MS
    elif mode == "trouble":
        parts |= {phase: parts[phase] + more * MS for phase, more in IN_TROUBLE.items()}
    return parts


class Rank:
    """One rank, in a process of its own."""

    def __init__(self, directory: str, rank: int, attempt: int, mode: mmap.mmap) -> None:
        self.rank = rank
        self.mode = mode
        self.writer = segment_writer.SegmentWriter(f"{directory}/rank-{rank}.bin")
        file = f"{directory}/workers-{rank}.bin"
        workers.claim(file)
        self.worker = workers.WorkersWriter(
            file, parent_pid=os.getpid(), worker=0, knows=workers.KNOWS_RUNQUEUE | workers.KNOWS_IO
        )
        self.calls = collectives.open_new(f"{directory}/collectives-{rank}.bin", attempt=attempt)
        self.calls[collectives.RECORDER] = collectives.READABLE
        words = self.writer.words
        words[StepTotals.budget_ppm] = 10_000
        words[CheckpointState.resumed_step] = 100 * attempt
        words[Pauses.compiles] = 3
        words[Pauses.compile_ns_total] = 900 * MS
        self.left_ns = 0
        self.trouble = False
        self.troubled_steps = 0
        self.hoard = b""

    def run(self) -> None:
        before_ns = time.monotonic_ns()
        while True:
            select.select((), (), (), PACE_S)
            now_ns = time.monotonic_ns()
            self.left_ns += now_ns - before_ns
            before_ns = now_ns
            mode = MODES[self.mode[0]]
            self.trouble = mode == "trouble"
            stands_still = self.trouble and self.rank == LEFT
            self.writer.words[Word.PID] = 0 if stands_still else os.getpid()
            if stands_still:
                self.left_ns = 0
            else:
                self.work(parts_of(mode, self.rank))

    def work(self, parts: dict[str, int]) -> None:
        """Make as many steps as there was time for."""
        step_ns = sum(parts.values())
        count, self.left_ns = divmod(self.left_ns, step_ns)
        if not count:
            return
        words = self.writer.words
        step(self.writer, count, parts)
        self.troubled_steps += count if self.trouble else 0
        words[Word.MICROSTEPS] += count if self.trouble else 0
        words[Word.SKIPPED_STEPS] = words[Word.STEPS] // 100 + self.troubled_steps // 4
        self._load(count, parts["data_wait"])
        self._pause(count, parts)
        self._use_gpu(count)
        self._meet(count, parts["comm"])
        self._save(count * parts["checkpoint"])
        self._measure(count)
        self._suffer()

    def _load(self, count: int, wait_ns: int) -> None:
        words = self.writer.words
        words[LoaderState.batches] += count
        words[LoaderState.eval_batches] += count if self.trouble else 0
        words[LoaderState.batch_bytes_total] += count * (2 if self.trouble else 1) * MIB
        words[LoaderState.wait_ns_total] += count * wait_ns
        words[LoaderState.transfer_ns_total] += count * MS // 2
        words[LoaderState.blocked_ns_total] += count * MS // 10
        bucket = sum(wait_ns > bound_ns for bound_ns in layout.STEP_BOUNDS_NS)
        words[Word.LOADER_WAIT_HISTOGRAM + bucket] += count
        slow = wait_ns > 10 * MS
        self.writer.write_queue((1, 6, 2, 3, 1) if self.trouble else (1, 2, 0 if slow else 2, 0, 0))
        fetch_ns = (50 if slow else 20) * MS
        blocked_ns = fetch_ns - 12 * MS
        self.worker.add(
            (
                *(count, 32 * count),
                *(count * fetch_ns, count * 10 * MS, count * 2 * MS, count * blocked_ns, count * MS),
                *(count * MIB, count * MIB // 4),
            )
        )

    def _pause(self, count: int, parts: dict[str, int]) -> None:
        words = self.writer.words
        words[Pauses.gc_collections] += count * (6 if self.trouble else 1)
        words[Pauses.gc_ns_total] += count * (parts["gc"] or MS // 50)
        words[Pauses.compiles] += count if self.trouble else 0
        words[Pauses.compile_ns_total] += count * parts["compile"]

    def _save(self, stalled_ns: int) -> None:
        """Save every so many steps, as `probe.progress` tells it; in trouble it comes to nothing."""
        words = self.writer.words
        words[CheckpointState.stall_ns_total] += stalled_ns
        if words[Word.STEPS] // SAVE_STEPS <= words[CheckpointState.saves] + words[CheckpointState.failures]:
            return
        if self.trouble:
            words[CheckpointState.failures] += 1
        else:
            words[CheckpointState.bytes_total] += MIB
            words[CheckpointState.step] = words[Word.STEPS]
            words[CheckpointState.captured_ns] = time.monotonic_ns()
            words[CheckpointState.saves] += 1

    def _measure(self, count: int) -> None:
        """Tell what the probe costs."""
        words = self.writer.words
        odd = self.trouble and self.rank == ODD
        cost_ns = 1_500_000 if self.trouble else 20_000
        words[Word.PROBE_NS_TOTAL] += count * cost_ns
        words[StepTotals.unobserved_steps] = self.troubled_steps // 4
        words[Word.HOOKS_UNAVAILABLE] = Hook.GPU_MEMORY_FRACTION if odd else 0
        if odd:
            words[Word.STEP_SOURCE] = StepSource.BACKWARD

    def _suffer(self) -> None:
        """Have much memory, and much to compute, or neither any more."""
        if self.trouble and self.rank == SLOW:
            self.hoard = self.hoard or b"\1" * HOARD_BYTES
        else:
            self.hoard = b""
        ends_s = time.process_time() + SPIN_S
        while self.trouble and self.rank == ODD and time.process_time() < ends_s:
            pass

    def _use_gpu(self, count: int) -> None:
        words = self.writer.words
        for word, amount in (
            (GpuMemory.allocated_bytes, 900 * MIB),
            (GpuMemory.peak_allocated_bytes, (2000 if self.trouble else 1000) * MIB),
            (GpuMemory.reserved_bytes, 1200 * MIB),
            (GpuMemory.peak_reserved_bytes, (2600 if self.trouble else 1300) * MIB),
            (GpuMemory.active_bytes, 920 * MIB),
            (GpuMemory.inactive_split_bytes, (600 if self.trouble else 100) * MIB),
            (GpuMemory.pinned_bytes, (640 if self.trouble else 64) * MIB),
        ):
            words[word] = amount
        if self.trouble:
            words[GpuMemory.alloc_retries] += count
            words[GpuMemory.ooms] += 1
        forward_ns = (28 if self.trouble else 14) * MS
        for word, amount in (
            (GpuTime.steps, 1),
            (GpuTime.step_ns_total, forward_ns + 30 * MS),
            (GpuTime.forward_ns_total, forward_ns),
            (GpuTime.backward_ns_total, 25 * MS),
            (GpuTime.optimizer_ns_total, 5 * MS),
        ):
            words[word] += amount
        for index, size_bytes in enumerate((16384, MIB, 4, 4096, MIB)):
            slow = self.trouble and layout.COPIES[index] == ("h2d", "pageable")
            copies = 6 * count if slow else count
            total_bytes = count * (8 * MIB if slow else size_bytes)
            blocked_ns, on_gpu_ns = (12 * MS, 4 * MS) if slow else (MS // 50, MS // 5)
            at = Word.COPY_FIRST + index * COPY_WORDS
            for place, amount in enumerate((copies, total_bytes, count * blocked_ns, count * on_gpu_ns)):
                words[at + place] += amount
        now_and_then = words[Word.STEPS] // 40 - (words[Word.STEPS] - count) // 40
        for index, kind in enumerate(layout.SYNCS):
            calls = now_and_then + (12 * count if self.trouble and kind == "item" else 0)
            words[Word.SYNC_FIRST + index * SYNC_WORDS] += calls
            words[Word.SYNC_FIRST + index * SYNC_WORDS + 1] += calls * MS

    def _meet(self, count: int, comm_ns: int) -> None:
        words, calls = self.writer.words, self.calls
        counter, running, returned = collectives.words_of_call("all_reduce")
        calls[counter] += count
        calls[collectives.ENQUEUED] += 2 * count
        open_calls = 9 if self.trouble else self.rank % 2
        calls[collectives.COMPLETED] = max(calls[collectives.COMPLETED], calls[collectives.ENQUEUED] - open_calls)
        calls[collectives.SEQUENCE] += 2 * count
        calls[collectives.CALL] = running if self.trouble or self.rank % 8 == 0 else returned
        words[Pauses.comm_calls] += count
        words[Pauses.comm_blocked_ns_total] += count * comm_ns
        words[Pauses.ddp_comm_ns], words[Pauses.ddp_overlap_ns] = comm_ns + 2 * MS, 4 * MS


class Agent:
    """Starts the ranks, and says what an agent says."""

    def __init__(self, directory: str, count: int) -> None:
        self.directory = directory
        self.count = count
        self.mode = mmap.mmap(-1, 1)
        self.pids: list[int] = []
        self.attempt = -1
        self.told_s = time.monotonic()
        self.restarts = 0
        self.to_lose_s = 0.0
        self.spent_s = dict.fromkeys(("startup", "checkpoint_stall", "lost_work", "restart", "productive"), 0.0)

    def put(self, name: str, content: object) -> None:
        draft = f"{self.directory}/{name}.draft"
        with open(draft, "w") as file:
            json.dump(content, file)
        os.rename(draft, f"{self.directory}/{name}")

    def start(self) -> None:
        """Begin an attempt."""
        self.attempt += 1
        for rank in range(self.count):
            segment_writer.create(f"{self.directory}/rank-{rank}.bin", rank=rank, local_rank=rank, attempt=self.attempt)
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
        """Tell where the time went: every second is in one bucket, once."""
        now_s = time.monotonic()
        passed_s, self.told_s = now_s - self.told_s, now_s
        trouble = MODES[self.mode[0]] == "trouble"
        lost_s = passed_s / 2 if trouble else min(passed_s, self.to_lose_s)
        self.to_lose_s = max(0.0, self.to_lose_s - lost_s)
        for bucket, share_s in (
            *(("lost_work", lost_s / 2), ("restart", lost_s / 2)),
            *(("checkpoint_stall", 0.02 * (passed_s - lost_s)), ("productive", 0.98 * (passed_s - lost_s))),
        ):
            self.spent_s[bucket] += share_s
        restarts = {"exception": self.restarts} if self.restarts else {}
        account = {"version": 1, "restarts": restarts, "goodput_seconds": self.spent_s}
        told = {"hang_suspicions": 2, "hangs": 1, "preempted": 1}
        stall = {"ranks": [0], "since_s": now_s - 60.0, "due_s": None, "what": "rank 0 rests"} if trouble else None
        counts = {name: count if trouble else 0 for name, count in told.items()}
        self.put("run.json", account | counts | {"stall": stall})

    def obey(self, order: str) -> None:
        """Do what a line says."""
        if order == "restart":
            self.stop()
            self.restarts += 1
            self.to_lose_s += 6.0
            self.account()
            self.start()
        else:
            self.mode[0] = MODES.index(order)
            trouble = f"{self.directory}/trouble"
            if order == "trouble":
                self.put("trouble", None)
            elif os.path.exists(trouble):
                os.unlink(trouble)

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
