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
            words = f"goes on after {'one restart' if self.restarts == 1 else f'{self.restarts} restarts'}"
            words += ", as if it had never happened"
        else:
            words = "nothing: training goes on" if self.code == 0 else "ends"
        return f"{words}; named {self.kind}, rank {self.rank}" if self.kind else words


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
        does="ends the other ranks, which only lost a peer, and starts all of them again",
    ),
    Row(
        name="os-exit",
        fault="a rank calls `os._exit(7)`",
        plant="os-exit",
        kind="exit_code",
        cause=7,
        does="the same; the code is the rank's own",
    ),
    Row(
        name="sigkill",
        fault="a rank is killed",
        acts=("kill-rank",),
        kind="signal",
        cause=KILLED,
        does="the same",
    ),
    Row(
        name="segfault",
        fault="native code in a rank touches memory that is not its own",
        plant="segfault",
        kind="segfault",
        cause=128 + signal.SIGSEGV,
        does="the same; the report has the Python line that called it",
    ),
    Row(
        name="early-exit",
        fault="a rank exits with 0 while the others still step",
        plant="exit-0",
        kind="early_exit_0",
        cause=1,
        does="takes it for a failure: the others need it",
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
        fault="a rank leaves a daemon of its own session behind and raises",
        plant="grandchild",
        kind="exception",
        cause=1,
        does="ends the daemon too: the agent is the subreaper of all it started",
    ),
    Row(
        name="repeats",
        fault="a rank raises the same exception at the same step, again and again",
        plant="always",
        kind="exception",
        cause=1,
        code=93,
        says=r"same|again|progress",
        does="restarts once, to tell a passing error from one that repeats; then it gives up and says so",
        must="ends with 93, after one restart of the three allowed; named exception, rank 1",
        allowed=3,
    ),
    # -- memory
    Row(
        name="oom-cgroup",
        fault="a rank outgrows the job's memory cgroup",
        plant="hog",
        around="memory-cgroup",
        kind="host_oom",
        cause=KILLED,
        root=True,
        does="tells the OOM killer's SIGKILL from any other by the cgroup's counter",
    ),
    Row(
        name="oom-limit",
        fault="the kernel gives a rank no more memory (`gpulaunch chaos oom-rank`)",
        plant="leak",
        acts=("oom-rank",),
        kind="host_oom",
        cause=1,
        does="ends the other ranks and starts all of them again",
    ),
    Row(
        name="shm-loader",
        fault="/dev/shm is too small for what DataLoader workers hand over",
        plant="big-batch",
        around="small-shm",
        kind="shm_full",
        cause=1,
        restarts=3,
        allowed=3,
        code=1,
        root=True,
        does="names /dev/shm and how to enlarge it; no step was made, so it starts all ranks again as often as "
        "`--max-restarts` says, after growing pauses",
        must="ends with 1 after three restarts; named shm_full, rank 1",
    ),
    Row(
        name="shm-pages",
        fault="the place of the shared pages (`GPULAUNCH_SHM_DIR`) is full",
        around="full-shm-dir",
        restarts=0,
        says=r"profiling is off|no profile of this attempt",
        root=True,
        does="says once that there is no profile",
    ),
    # -- hangs
    Row(
        name="sigstop",
        fault="a rank is stopped (SIGSTOP)",
        acts=("hang-rank",),
        kind="hang",
        cause=124,
        allowed_s=STOPPED_S,
        does="sees that no step ends any more, shows all stacks, and starts all ranks again",
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
        does="the same; the rank whose stack differs from the others' is named",
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
        does="tells rank, line and what waits for it after 30 s; it may be a retry, so it starts all ranks again only "
        "after `--hang-timeout` (600 s where it is not given)",
    ),
    Row(
        name="stall-dataset",
        fault="a dataset sleeps for 40 s, in the training process",
        plant="stall-dataset",
        program=("--workers", "0"),
        restarts=0,
        told=True,
        says=r"rank 1 moves again after \d+",
        does="tells it after 30 s, and takes it back",
    ),
    Row(
        name="hang-gil",
        fault="native code sleeps and holds the GIL",
        plant="hold-gil",
        kind="hang",
        cause=124,
        allowed_s=HELD_S,
        told=True,
        does="the same after 130 s, as a slow file system may stall code that holds the GIL; nothing in the rank has "
        "to answer",
    ),
    Row(
        name="teardown",
        fault="a rank holds the GIL for ever after `destroy_process_group()`, as torch's teardown can",
        plant="teardown",
        kind="hang",
        cause=124,
        code=124,
        restarts=0,
        allowed=1,
        says=r"rank 1 has finished \(60 steps; its process group is destroyed\), is stuck in its teardown",
        does="says that it has finished; its steps count as productive, and it is not started again, which might do "
        "all of them anew",
    ),
    Row(
        name="slow-rank",
        fault="a rank is four times slower for two seconds",
        acts=("slow-rank",),
        restarts=0,
        does="takes it for no hang",
    ),
    # -- beside the ranks
    Row(
        name="loader-worker",
        fault="a DataLoader worker is killed",
        acts=("kill-loader",),
        program=("--pace", "0.1"),  # an epoch has its own, and they end with it
        kind="loader_worker",
        cause=1,
        does="ends the other ranks and starts all of them again",
    ),
    Row(
        name="fork-server",
        fault="the fork server is killed, and a rank after it",
        acts=("kill-fork-server", "kill-rank"),
        kind="signal",
        cause=KILLED,
        does="ranks that run need it no more; the restart gets a new one",
    ),
    Row(
        name="store",
        fault="the ranks' store is killed",
        acts=("kill-store",),
        says=r"the ranks' store \(pid \d+\) was killed by SIGKILL",
        does="starts all ranks again, with a new store: who asks the old one would wait for ever",
    ),
    Row(
        name="sidecar",
        fault="the sidecar is killed",
        acts=("kill-sidecar",),
        restarts=0,
        says=r"the metrics sidecar ended",
        does="starts another one at the same address",
    ),
    Row(
        name="agent",
        fault="the agent is killed, and the job started again in its directory",
        acts=("kill-agent", "start-again"),
        restarts=0,
        save_every=5,
        does="everything goes with the agent; started again, the job goes on from its newest checkpoint",
        must="nothing is left, and the second run goes on from the newest checkpoint",
    ),
    # -- checkpoints and disks
    Row(
        name="disk-full",
        fault="the disk for the checkpoints is full until the last step",
        around="small-checkpoint-disk",
        acts=("enlarge-disk",),
        restarts=0,
        save_every=5,
        says=r"No space left on device",
        root=True,
        does="says that a checkpoint could not be saved, and why; the next save tries again",
    ),
    Row(
        name="last-save-lost",
        fault="the disk for the checkpoints is full, to the end",
        around="small-checkpoint-disk",
        of_all_ranks=True,
        restarts=0,
        allowed=0,
        code=1,
        save_every=5,
        kind="disk_full",
        says=r"step \d+, the last, is not saved",
        root=True,
        must="ends with an error: the end of the training is lost",
        does="tries the last save three times, in 6 s, then ends the program with `CheckpointError`",
    ),
    Row(
        name="checkpoint-truncated",
        fault="the newest checkpoint is cut short, then a rank is killed",
        acts=("truncate-checkpoint", "kill-rank"),
        save_every=5,
        kind="signal",
        cause=KILLED,
        says=r"is passed over",
        does="skips it, says why, and goes on from the one before",
    ),
    Row(
        name="checkpoint-bit",
        fault="one bit of the newest checkpoint is flipped, then a rank is killed",
        acts=("flip-checkpoint", "kill-rank"),
        save_every=5,
        kind="signal",
        cause=KILLED,
        says=r"is passed over",
        does="the same, by its SHA-256",
    ),
    Row(
        name="checkpoint-shard",
        fault="the newest checkpoint loses a shard, then a rank is killed",
        acts=("remove-checkpoint", "kill-rank"),
        save_every=5,
        kind="signal",
        cause=KILLED,
        says=r"is passed over",
        does="the same",
    ),
    # -- surroundings
    Row(
        name="port-taken",
        fault="the port for the store is taken",
        around="taken-port",
        restarts=0,
        code=69,
        says=r"gpulaunch: error: .*port .*in use",
        does="says so before anything is started",
        must="ends at once, with one line",
    ),
    Row(
        name="clock-back",
        fault="the wall clock goes back by an hour, checkpoints' times too; then a rank is killed",
        acts=("clock-back", "kill-rank"),
        around="clock",
        save_every=5,
        kind="signal",
        cause=KILLED,
        does="every deadline is on the monotonic clock, and the newest checkpoint is the one with the highest step",
    ),
    Row(
        name="stdout-closed",
        fault="whoever reads gpulaunch's output goes away",
        acts=("close-output",),
        restarts=0,
        does="goes on; the ranks' files are complete",
    ),
    Row(
        name="double-ctrl-c",
        fault="Ctrl-C twice, and the ranks ignore it",
        acts=("ctrl-c", "ctrl-c"),
        options=("--shutdown-timeout", "600"),
        program=("--deaf-to", "SIGINT,SIGTERM"),
        restarts=0,
        code=128 + signal.SIGINT,
        says=r"SIGINT again: ending at once",
        does="the first asks the ranks to end, the second ends them",
        must="ends at once with 130",
    ),
)
