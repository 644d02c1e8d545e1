"""The faults that a job is put through, one row each: what is done, what must hold, what gpulaunch does.

`test_faults.py` makes each of them; `docs/faults.md` is this table for people: `python tests/faults/fault_page.py`
writes it.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

STOPPED_S, DEADLOCK_S, HELD_S = 13.0, 18.0, 130.0
"""What hang detection takes to be sure: 10 s before it looks at any rank, then as long as hang/values.py says."""
TOLD_S = 60.0
"""A rank that rests is told of after 30 s, on a busy machine a little later; this is the most that is promised."""
TIMEOUT_S = 45.0
"""The --hang-timeout of the row whose rank only rests."""
KILLED = 128 + signal.SIGKILL


@dataclass(frozen=True, kw_only=True)
class Row:
    """One fault. What it does to itself is in train.py; what is done to it, and around it, in fault_harness.py."""

    name: str
    fault: str
    """What is done, for people."""
    does: str
    """What gpulaunch does about it."""
    must: str = ""
    """What must hold; derived from the fields below where it is empty."""
    plant: str = ""
    """What one rank does to itself."""
    rank: int = 1
    """Which rank the fault befalls."""
    acts: tuple[str, ...] = ()
    """What is done from outside, in this order, once all ranks step: faults of `gpulaunch chaos` and of the harness."""
    around: str = ""
    """RunContext that are too small, taken or wrong."""
    ranks: int = 2
    options: tuple[str, ...] = ()
    program: tuple[str, ...] = ()
    """Further arguments of the program."""
    save_every: int = 0
    """With checkpoints, so far apart."""
    restarts: int = 1
    """How many restarts it costs."""
    allowed: int | None = None
    """How many restarts the job is allowed; None: one more than it costs."""
    code: int = 0
    """The exit code of the job."""
    cause: int | None = None
    """The exit code if it had not been restarted, as failure.json of the first attempt has it."""
    kind: str = ""
    """The kind in failure.json of the first attempt; "": no rank is to blame."""
    says: str = ""
    """A pattern for what gpulaunch says."""
    told: bool = False
    """It is told of within TOLD_S, with the rank's place."""
    allowed_s: float = 1.5
    """What the settings give the fault to be seen or to end by itself: no fault of gpulaunch's."""
    root: bool = False
    of_all_ranks: bool = False
    """All fail together: which of them is named is chance."""

    @property
    def command(self) -> str:
        """The command that makes it."""
        return f"pytest tests/faults -k {self.name}"

    @property
    def holds(self) -> str:
        """What must hold, in words."""
        if self.must:
            return self.must
        if self.restarts:
            words = f"{'one restart' if self.restarts == 1 else f'{self.restarts} restarts'}, same result"
        else:
            words = "training continues" if self.code == 0 else "the job ends"
        return f"{words}; first cause {self.kind}, rank {self.rank}" if self.kind else words


ROWS: tuple[Row, ...] = (
    # -- a rank ends
    Row(
        name="exception",
        fault="one rank of four raises",
        plant="exception",
        rank=2,
        ranks=4,
        kind="exception",
        cause=1,
        does="terminates the other ranks, which only lost a peer, and restarts all ranks",
    ),
    Row(
        name="os-exit",
        fault="a rank calls `os._exit(7)`",
        plant="os-exit",
        kind="exit_code",
        cause=7,
        does="the same; the exit code is the rank's own",
    ),
    Row(
        name="sigkill",
        fault="a rank is killed (SIGKILL)",
        acts=("kill-rank",),
        kind="signal",
        cause=KILLED,
        does="the same",
    ),
    Row(
        name="segfault",
        fault="native code in a rank accesses invalid memory",
        plant="segfault",
        kind="segfault",
        cause=128 + signal.SIGSEGV,
        does="the same; the report names the Python line that called it",
    ),
    Row(
        name="early-exit",
        fault="a rank exits with 0 while the others are still training",
        plant="exit-0",
        kind="early_exit_0",
        cause=1,
        does="treats it as a failure, because the others need it",
    ),
    Row(
        name="ignores-sigterm",
        fault="a rank raises while another hangs and ignores SIGTERM",
        plant="deaf",
        kind="exception",
        cause=1,
        does="kills the survivor after `--failure-grace`",
    ),
    Row(
        name="grandchild",
        fault="a rank leaves a daemon in a session of its own behind and raises",
        plant="grandchild",
        kind="exception",
        cause=1,
        does="terminates the daemon too: the agent is the subreaper of all its descendants",
    ),
    Row(
        name="repeats",
        fault="a rank raises the same exception at the same step in every attempt",
        plant="always",
        kind="exception",
        cause=1,
        code=93,
        says=r"same|again|progress",
        does="restarts once, to distinguish a transient error from a persistent one; then stops and says so",
        must="exit code 93 after one restart of the three allowed; first cause exception, rank 1",
        allowed=3,
    ),
    # -- memory
    Row(
        name="oom-cgroup",
        fault="a rank exceeds the memory limit of the job's cgroup",
        plant="hog",
        around="memory-cgroup",
        kind="host_oom",
        cause=KILLED,
        root=True,
        does="recognizes the OOM killer's SIGKILL by the cgroup's counter",
    ),
    Row(
        name="oom-limit",
        fault="the kernel refuses a rank more memory (`gpulaunch chaos oom-rank`)",
        plant="leak",
        acts=("oom-rank",),
        kind="host_oom",
        cause=1,
        does="terminates the other ranks and restarts all ranks",
    ),
    Row(
        name="shm-loader",
        fault="/dev/shm is too small for the batches of the DataLoader workers",
        plant="big-batch",
        around="small-shm",
        kind="shm_full",
        cause=1,
        restarts=3,
        allowed=3,
        code=1,
        root=True,
        does="names /dev/shm and how to enlarge it; no step was made, so it restarts up to `--max-restarts` times, "
        "with increasing pauses",
        must="exit code 1 after three restarts; first cause shm_full, rank 1",
    ),
    Row(
        name="shm-pages",
        fault="the directory of the shared-memory segments (`GPULAUNCH_SHM_DIR`) is full",
        around="full-shm-dir",
        restarts=0,
        says=r"profiling is off|no profile of this attempt",
        root=True,
        does="reports once that there is no profile",
    ),
    # -- hangs
    Row(
        name="sigstop",
        fault="a rank is stopped (SIGSTOP)",
        acts=("hang-rank",),
        kind="hang",
        cause=124,
        allowed_s=STOPPED_S,
        does="detects that steps no longer end, prints all stacks, and restarts all ranks",
    ),
    Row(
        name="deadlock",
        fault="one rank of four skips an all_reduce and waits in another",
        plant="deadlock",
        rank=2,
        ranks=4,
        kind="hang",
        cause=124,
        allowed_s=DEADLOCK_S,
        does="the same; names the rank whose stack differs from the others'",
    ),
    Row(
        name="hang-dataset",
        fault="a dataset hangs, in the training process, with `--hang-timeout 45`",
        plant="hang-dataset",
        program=("--workers", "0"),
        options=("--hang-timeout", str(TIMEOUT_S)),
        kind="hang",
        cause=124,
        told=True,
        says=r"rank 1 is in train.py:\d+ sleep\(\), rank 0 waits for it in backward: no progress for \d+",
        allowed_s=TIMEOUT_S,
        does="reports the rank, its line and the waiting ranks after 30 s; it may be a retry, so all ranks restart "
        "only after `--hang-timeout` (default 600 s)",
    ),
    Row(
        name="stall-dataset",
        fault="a dataset sleeps for 40 s, in the training process",
        plant="stall-dataset",
        program=("--workers", "0"),
        restarts=0,
        told=True,
        says=r"rank 1 moves again after \d+",
        does="reports a possible hang after 30 s, and then that the rank moves again",
    ),
    Row(
        name="hang-gil",
        fault="native code sleeps and holds the GIL",
        plant="hold-gil",
        kind="hang",
        cause=124,
        allowed_s=HELD_S,
        told=True,
        does="reports it, and restarts all ranks after 130 s, because code that holds the GIL may wait for a slow file "
        "system; detection needs no response from the rank",
    ),
    Row(
        name="teardown",
        fault="a rank holds the GIL forever after `destroy_process_group()`, as torch's teardown can",
        plant="teardown",
        kind="hang",
        cause=124,
        code=124,
        restarts=0,
        allowed=1,
        says=r"rank 1 has finished \(60 steps; its process group is destroyed\), is stuck in its teardown",
        does="reports that the rank has finished; its steps count as productive, and there is no restart, which might "
        "repeat all of them",
    ),
    Row(
        name="slow-rank",
        fault="a rank is four times slower for two seconds",
        acts=("slow-rank",),
        restarts=0,
        does="does not report a hang",
    ),
    # -- beside the ranks
    Row(
        name="loader-worker",
        fault="a DataLoader worker is killed",
        acts=("kill-loader",),
        program=("--pace", "0.1"),  # an epoch has its own, and they end with it
        kind="loader_worker",
        cause=1,
        does="terminates the other ranks and restarts all ranks",
    ),
    Row(
        name="fork-server",
        fault="the fork server is killed, then a rank",
        acts=("kill-fork-server", "kill-rank"),
        kind="signal",
        cause=KILLED,
        does="running ranks do not need it; the restart starts a new one",
    ),
    Row(
        name="store",
        fault="the ranks' store is killed",
        acts=("kill-store",),
        says=r"the ranks' store \(pid \d+\) was killed by SIGKILL",
        does="restarts all ranks with a new store, because requests to the old one would wait forever",
    ),
    Row(
        name="sidecar",
        fault="the sidecar is killed",
        acts=("kill-sidecar",),
        restarts=0,
        says=r"the metrics sidecar ended",
        does="starts a new one at the same address",
    ),
    Row(
        name="agent",
        fault="the agent is killed, and the job is started again in its directory",
        acts=("kill-agent", "start-again"),
        restarts=0,
        save_every=5,
        does="all processes end with the agent; when started again, the job continues from its newest checkpoint",
        must="no process is left, and the second run continues from the newest checkpoint",
    ),
    # -- checkpoints and disks
    Row(
        name="disk-full",
        fault="the checkpoint disk is full until the last step",
        around="small-checkpoint-disk",
        acts=("enlarge-disk",),
        restarts=0,
        save_every=5,
        says=r"No space left on device",
        root=True,
        does="reports that a checkpoint could not be saved, and why; the next save tries again",
    ),
    Row(
        name="last-save-lost",
        fault="the checkpoint disk is full to the end",
        around="small-checkpoint-disk",
        of_all_ranks=True,
        restarts=0,
        allowed=0,
        code=1,
        save_every=5,
        kind="disk_full",
        says=r"the last step, \d+, was not saved",
        root=True,
        must="the job fails: the final state is lost",
        does="tries the last save three times in 6 s, then the program fails with `CheckpointError`",
    ),
    Row(
        name="checkpoint-truncated",
        fault="the newest checkpoint is truncated, then a rank is killed",
        acts=("truncate-checkpoint", "kill-rank"),
        save_every=5,
        kind="signal",
        cause=KILLED,
        says=r"is skipped",
        does="skips it, reports why, and continues from the previous one",
    ),
    Row(
        name="checkpoint-bit",
        fault="one bit of the newest checkpoint is flipped, then a rank is killed",
        acts=("flip-checkpoint", "kill-rank"),
        save_every=5,
        kind="signal",
        cause=KILLED,
        says=r"is skipped",
        does="the same, detected by SHA-256",
    ),
    Row(
        name="checkpoint-shard",
        fault="the newest checkpoint loses a shard, then a rank is killed",
        acts=("remove-checkpoint", "kill-rank"),
        save_every=5,
        kind="signal",
        cause=KILLED,
        says=r"is skipped",
        does="the same",
    ),
    # -- surroundings
    Row(
        name="port-taken",
        fault="the port for the store is in use",
        around="taken-port",
        restarts=0,
        code=69,
        says=r"gpulaunch: error: .*port .*in use",
        does="reports it before anything starts",
        must="exits at once, with one line",
    ),
    Row(
        name="clock-back",
        fault="the wall clock and the checkpoints' times go back by an hour, then a rank is killed",
        acts=("clock-back", "kill-rank"),
        around="clock",
        save_every=5,
        kind="signal",
        cause=KILLED,
        does="uses the monotonic clock for all deadlines; the newest checkpoint is the one with the highest step",
    ),
    Row(
        name="stdout-closed",
        fault="the reader of gpulaunch's output closes the pipe",
        acts=("close-output",),
        restarts=0,
        does="continues; the ranks' files are complete",
    ),
    Row(
        name="double-ctrl-c",
        fault="Ctrl-C twice, while the ranks ignore it",
        acts=("ctrl-c", "ctrl-c"),
        options=("--shutdown-timeout", "600"),
        program=("--deaf-to", "SIGINT,SIGTERM"),
        restarts=0,
        code=128 + signal.SIGINT,
        says=r"SIGINT again: ending immediately",
        does="the first asks the ranks to exit, the second kills them",
        must="exits at once with 130",
    ),
)
