"""Reads what `srun` tells each of its tasks: where the launchers of one step meet, and who they are. Pure.

Several tasks of one step are one job, each task's launcher one of its nodes. No command of Slurm is called: containers
often have none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from gpulaunch.launcher.job.options import UsageError

# Slurm numbers the steps that are not a user's srun from the top: batch, extern, interactive and pending. A batch
# script also has SLURM_PROCID=0 and SLURM_NTASKS=N, so only a step id below these proves that srun started us.
_FIRST_SPECIAL_STEP = 0xFFFFFFFA
_MAX_HOSTS = 1 << 16
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""What Slurm sets for the GPUs of a task: NVIDIA, AMD, Intel."""
_FIRST_PORT, _NUM_PORTS = 20000, 9000
"""Below the ports that Linux gives to connections (32768 to 60999), without those that torchrun uses (29400, 29500)."""
_STEPS_APART = 16
"""Ports between two jobs: steps that run side by side differ, and so do jobs submitted one after the other."""
_TOLD = "name the nodes with --nnodes, --node-rank and --master-addr, or give each task a job of its own: --standalone"


@dataclass(frozen=True, kw_only=True)
class Task:
    """This launcher's place among the tasks of its step."""

    job: int
    step: int
    restart: int
    """How often Slurm has requeued the job."""
    cluster: str
    rank: int
    """SLURM_PROCID."""
    num_tasks: int
    host: int
    """Index of this host among those of the step: SLURM_NODEID."""
    hosts: tuple[str, ...]
    local_id: int
    """Index of this task among those of its host: SLURM_LOCALID."""
    tasks_per_host: tuple[int, ...]

    @property
    def num_local(self) -> int:
        """The tasks on this host."""
        return self.tasks_per_host[self.host]

    @property
    def one_per_host(self) -> bool:
        """Whether every task has a host of its own."""
        return max(self.tasks_per_host) == 1

    @property
    def leads(self) -> bool:
        """Whether the others meet here: the first task on the first host, which is task 0 unless the user has placed
        the tasks in another order (--distribution=arbitrary)."""
        return self.host == 0 and self.local_id == 0

    @property
    def meeting_host(self) -> str:
        """The host that all tasks know."""
        return self.hosts[0] if len(self.hosts) > 1 else "localhost"

    @property
    def meeting_port(self) -> int:
        """Another for each step, and after each requeue: what is left of the last run must not be met."""
        return _FIRST_PORT + (_STEPS_APART * self.job + self.step + 5 * self.restart) % _NUM_PORTS

    @property
    def name(self) -> str:
        """JOB.STEP, as Slurm writes it; a requeued job keeps it."""
        return f"{self.job}.{self.step}"


def num_tasks(environ: Mapping[str, str]) -> int:
    """How many tasks of one `srun` run the same command as this process; 1 if there is no such step.

    With `srun --pty` one task has the terminal; a shell in each of the others has nothing to read and ends. Children of
    a rank inherit its launcher's variables.
    """
    tasks = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", ""))
    if not in_step(environ) or not tasks.isdecimal():
        return 1
    apart = "TORCHELASTIC_RUN_ID" in environ or any(name.startswith("SLURM_PTY_") for name in environ)
    return 1 if apart else int(tasks)


def in_step(environ: Mapping[str, str]) -> bool:
    """Whether a user's srun started this."""
    step = environ.get("SLURM_STEP_ID", "")
    return "SLURM_JOB_ID" in environ and step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP


def task(environ: Mapping[str, str]) -> Task | None:
    """This process among several tasks of a step; None if it is alone.

    Raises:
        UsageError: Slurm's variables do not say enough.
    """
    tasks = num_tasks(environ)
    if tasks == 1:
        return None
    if environ.get("SLURM_HET_SIZE", "1") != "1":  # its parts have different job ids
        raise UsageError(f"a heterogeneous job of Slurm is not read from its variables: {_TOLD}")
    text = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    per_host = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    try:
        found = Task(
            job=int(environ["SLURM_JOB_ID"]),
            step=int(environ["SLURM_STEP_ID"]),
            restart=int(environ.get("SLURM_RESTART_COUNT", "0")),
            cluster=environ.get("SLURM_CLUSTER_NAME", ""),
            rank=int(environ["SLURM_PROCID"]),
            num_tasks=tasks,
            host=int(environ["SLURM_NODEID"]),
            hosts=expand(text),
            local_id=int(environ["SLURM_LOCALID"]),
            tasks_per_host=repeated(per_host),
        )
    except KeyError as err:
        raise UsageError(f"srun starts {tasks} tasks, but {err.args[0]} is missing: {_TOLD}") from None
    except ValueError as err:
        raise UsageError(f"srun starts {tasks} tasks, but its variables cannot be read ({err}): {_TOLD}") from None
    if not (
        len(found.hosts) == len(found.tasks_per_host)
        and sum(found.tasks_per_host) == tasks
        and 0 <= found.rank < tasks
        and 0 <= found.host < len(found.hosts)
        and 0 <= found.local_id < found.num_local
    ):
        said = f"task {found.rank}, number {found.local_id} on host {found.host} of {text} with {per_host} tasks"
        raise UsageError(f"srun starts {tasks} tasks, but its variables contradict each other ({said}): {_TOLD}")
    return found


def first_local_rank(task: Task, nproc: int, environ: Mapping[str, str]) -> int:
    """LOCAL_RANK of the first rank of a task with `nproc` ranks: the number of its GPU among those that it sees.

    Tasks of a host that see the same GPUs count on; a task that sees only its own (--gpus-per-task, --gpu-bind) counts
    from 0; without GPUs it is the number of the rank on the host.
    """
    visible = num_visible(environ)
    if has_own_gpus(task, environ):
        return 0
    return (task.local_id * nproc) % visible if visible else task.local_id * nproc


def has_own_gpus(task: Task, environ: Mapping[str, str]) -> bool:
    """Whether this task sees no GPU of another one on its host: together they see no more than there are."""
    visible, on_host = num_visible(environ), environ.get("SLURM_GPUS_ON_NODE", "")
    return visible == 1 or (on_host.isdecimal() and 0 < visible * task.num_local <= int(on_host))


def num_visible(environ: Mapping[str, str]) -> int:
    """How many GPUs Slurm lets this task see; 0 if it says nothing."""
    text = next((environ[name] for name in _VISIBLE if environ.get(name)), "")
    return len([entry for entry in text.split(",") if entry.strip()]) if "NoDevFiles" not in text else 0


def cores_of_task(task: Task, cores: int, environ: Mapping[str, str]) -> int:
    """The part of `cores`, which this process may use, that is this task's: where Slurm does not bind tasks to cores,
    all tasks of a host may use those of the step."""
    on_host = environ.get("SLURM_CPUS_ON_NODE", "")
    step = int(on_host) if on_host.isdecimal() else cores
    return cores if cores < step else max(1, min(cores, step) // task.num_local)


def expand(text: str) -> tuple[str, ...]:
    """`gpu[01-03,7],x1` -> gpu01, gpu02, gpu03, gpu7, x1.

    Raises:
        ValueError: it is not such a list.
    """
    hosts: list[str] = []
    for item in _split(text):
        pieces = re.split(r"\[([^\[\]]*)\]", item)
        if any(char in piece for piece in pieces[::2] for char in "[]") or not item:
            raise ValueError(f"not a list of hosts: {text!r}")
        parts = [[piece] if index % 2 == 0 else list(_numbers(piece, text)) for index, piece in enumerate(pieces)]
        hosts += map("".join, product(*parts))
        if len(hosts) > _MAX_HOSTS:
            raise ValueError(f"more than {_MAX_HOSTS} hosts: {text!r}")
    return tuple(hosts)


def _split(text: str) -> list[str]:
    """At the commas that are not in brackets."""
    return re.split(r",(?![^\[]*\])", text)


def _numbers(ranges: str, text: str) -> Iterator[str]:
    for each in ranges.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", each, re.ASCII)
        if found is None:
            raise ValueError(f"not a list of hosts: {text!r}")
        first, last = found[1], found[2] or found[1]
        if not int(first) <= int(last) < int(first) + _MAX_HOSTS:
            raise ValueError(f"not a list of hosts: {text!r}")
        yield from (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))


def repeated(text: str) -> tuple[int, ...]:
    """`2(x3),1` -> 2, 2, 2, 1, as Slurm writes numbers for the hosts of a step.

    Raises:
        ValueError: it is not such a list.
    """
    numbers: list[int] = []
    for each in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", each, re.ASCII)
        if found is None or int(found[2] or 1) > _MAX_HOSTS:
            raise ValueError(f"not numbers of tasks: {text!r}")
        numbers += [int(found[1])] * int(found[2] or 1)
    return tuple(numbers)
