"""A real Slurm of two nodes on this machine: munged, slurmctld and two slurmd in a private directory, on loopback.

Each slurmd has a host name of its own, which both know, as on a cluster: in UTS and mount namespaces.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

PROGRAMS = ("munged", "unshare", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo")
PATIENCE_S = 150.0
KILL_WAIT_S = 15
"""What Slurm leaves between SIGTERM and SIGKILL; its default is 30."""

NUM_GPUS = 16
"""Of each node, and only in Slurm's books."""

# What a step is sent, proctrack/linuxproc sends to its whole tree, ranks and helpers included. proctrack/cgroup, which
# most sites have, sends it only to what slurmstepd itself started, and that is gpulaunch: the easier case.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={home}/munge.sock
CredType=cred/munge
SlurmctldPort={ports[0]}
SlurmctldPidFile={home}/slurmctld.pid
StateSaveLocation={home}/state
SlurmdPidFile={home}/slurmd.%n.pid
SlurmdSpoolDir={home}/spool.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
FirstJobId={first_job}
ReturnToService=2
KillWait={kill_wait_s}
GresTypes=gpu
NodeName=DEFAULT CPUs=64 Gres=gpu:{num_gpus} State=UNKNOWN
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[2]}]
PartitionName=all Nodes=ALL Default=YES MaxTime=60:00 State=UP
"""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A submitted job and its own directory, where it runs."""

    id: str
    cwd: Path

    @property
    def output(self) -> str:
        """What the batch script and its steps have printed."""
        path = self.cwd / "job.out"
        return path.read_text(errors="replace") if path.exists() else ""


class Slurm:
    """The cluster: submit, ask, wait."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._log = open(home / "log", "ab")
        scripts = sysconfig.get_path("scripts")
        self._nodes: dict[str, int] = {}
        drop = ("PET_", "GPULAUNCH_", "TORCHELASTIC_", "SLURM_", "SBATCH_", "TEST_OF_GPULAUNCH")
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(drop)},
            "PATH": f"{scripts}:{os.environ['PATH']}:/usr/sbin",
            "SLURM_CONF": str(home / "slurm.conf"),
            "XDG_RUNTIME_DIR": str(home / "runtime"),
            "TMPDIR": str(home / "tmp"),
        }

    def start(self) -> None:
        """Start the daemons in the foreground, as children, and wait until both nodes are idle."""
        home, host = self.home, socket.gethostname()
        for name in ("state", "spool.n1", "spool.n2", "runtime", "tmp"):
            (home / name).mkdir(mode=0o700)
        key = home / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        # GPUs that jobs can ask for, as the examples do: Slurm only looks whether these files are devices.
        for index in range(NUM_GPUS):
            os.mknod(home / f"gpu{index}", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        (home / "gres.conf").write_text(f"NodeName=n[1-2] Name=gpu File={home}/gpu[0-{NUM_GPUS - 1}]\n")
        # 22.05 looks for a cgroup even where it uses none; from 23.11 on that can be switched off.
        version = subprocess.run(["slurmd", "-V"], env=self.env, capture_output=True, text=True).stdout
        new = tuple(map(int, re.findall(r"\d+", version)[:2])) >= (23, 11)
        (home / "cgroup.conf").write_text(
            "CgroupPlugin=disabled\n" if new else "CgroupAutomount=no\nIgnoreSystemd=yes\n"
        )
        (home / "slurm.conf").write_text(
            CONFIGURATION.format(
                home=home,
                host=host,
                ports=three_ports(),
                kill_wait_s=KILL_WAIT_S,
                num_gpus=NUM_GPUS,
                # The port where a job's nodes meet follows from its number, and another cluster may run beside this.
                first_job=1 + 20 * (os.getpid() % 28),
            )
        )
        self._daemon(
            *("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={home}/munge.sock"),
            *(f"--pid-file={home}/munged.pid", f"--seed-file={home}/munge.seed", f"--log-file={home}/munged.log"),
        )
        self.wait_until(lambda: (home / "munge.sock").exists(), "munged did not start")
        (home / "hosts").write_text("127.0.0.1 localhost\n127.0.0.11 n1\n127.0.0.12 n2\n")
        self._daemon("slurmctld", "-D", "-i")
        for node in ("n1", "n2"):
            self.start_node(node)
        self.wait_for_nodes()

    def wait_for_nodes(self) -> None:
        """Wait until both nodes are idle."""
        self.wait_until(lambda: self.run("sinfo", "-h", "-o", "%T %D").split() == ["idle", "2"], "no idle nodes")

    def start_node(self, node: str) -> None:
        """Start its slurmd."""
        as_host = f"hostname {node} && mount --bind {self.home}/hosts /etc/hosts && exec slurmd -D -N {node}"
        self._nodes[node] = self._daemon("unshare", "--uts", "--mount", "sh", "-c", as_host)

    def lose_node(self, node: str) -> None:
        """Kill all that runs on a node, its slurmd too, and have Slurm see it at once (SlurmdTimeout is minutes).

        Children first: the kernel sends SIGHUP to a stopped process group whose parent ends.
        """
        uts = os.readlink(f"/proc/{self._nodes[node]}/ns/uts")
        for signum in (signal.SIGSTOP, signal.SIGKILL):
            for pid in sorted(map(int, filter(str.isdecimal, os.listdir("/proc"))), reverse=True):
                with contextlib.suppress(OSError):  # ended meanwhile
                    if os.readlink(f"/proc/{pid}/ns/uts") == uts:
                        os.kill(pid, signum)
        self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")

    def repair_node(self, node: str) -> None:
        """Start it again after `lose_node`."""
        self.start_node(node)
        self.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
        self.wait_for_nodes()

    def submit(
        self, script: Path, cwd: Path, *options: str, args: Sequence[str] = (), env: Mapping[str, str] | None = None
    ) -> Job:
        """sbatch the script with these options, in a directory of its own; `env` is added to the job's environment."""
        cwd.mkdir()
        argv = ("sbatch", "--parsable", "--output=job.out", f"--chdir={cwd}", *options, str(script), *args)
        return Job(id=self.run(*argv, env=env).strip(), cwd=cwd)

    def field(self, job: Job, name: str) -> str:
        """One field of `scontrol show job`."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", job.id))).get(name, "")

    def ended(self, job: Job) -> bool:
        """Whether it has ended for good. Slurm has many words for jobs that have not."""
        return self.field(job, "JobState") in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")

    def start_again(self, job: Job) -> None:
        """Start a requeued job soon, with all the time it needs.

        Slurm waits two minutes by itself: in the second in which a job ended its credential is still revoked.
        """
        self.wait_until(lambda: self.field(job, "JobState") == "PENDING", f"job {job.id} is not requeued", job)
        self.run("scontrol", "update", f"JobId={job.id}", "StartTime=now+3", "TimeLimit=30")

    def happens(self, done: Callable[[], object], job: Job | None = None) -> bool:
        """Wait until it is so; False if it is not in time, or if the job has ended and it is not."""
        until_s = time.monotonic() + PATIENCE_S
        while not done():
            if time.monotonic() > until_s or (job is not None and self.ended(job)):
                return bool(done())
            time.sleep(0.1)
        return True

    def wait_until(self, done: Callable[[], object], else_say: str, job: Job | None = None) -> None:
        """Wait until it is so; otherwise fail the test, with everything that was said."""
        if not self.happens(done, job):
            said = job.output if job else (self.home / "log").read_text(errors="replace")[-4000:]
            state = f"it is {self.field(job, 'JobState')}" if job else ""
            pytest.fail(f"{else_say}; {state}\n{said}")

    def run(self, *argv: str, env: Mapping[str, str] | None = None) -> str:
        """Run one of Slurm's commands and give what it prints."""
        done = subprocess.run(argv, env={**self.env, **(env or {})}, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0 or argv[0] in ("sinfo", "squeue"), f"{' '.join(argv)}: {done.stderr}"
        return done.stdout

    def close(self) -> None:
        """End all jobs, then the daemons, by their pids."""
        with contextlib.suppress(AssertionError):
            self.run("scancel", "--signal=KILL", "--user=root")
            self.run("scancel", "--user=root")
            self.wait_until(lambda: not self.run("squeue", "-h").strip(), "jobs do not end")
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._log.close()

    def _daemon(self, *argv: str) -> int:
        daemon = subprocess.Popen(argv, env=self.env, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log)
        self._daemons.append(daemon)
        return daemon.pid


def three_ports() -> list[int]:
    """One port, and two in a row: Slurm numbers its nodes' ports as a range."""
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
            for sock in sockets[:2]:
                sock.bind(("127.0.0.1", 0))
            ports = [sock.getsockname()[1] for sock in sockets[:2]]
            sockets[2].bind(("127.0.0.1", ports[1] + 1))
            return [*ports, ports[1] + 1]


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """The cluster, once for all tests that need it."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if missing:
        pytest.skip(f"needs Debian's slurm-wlm and munge: no {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("needs root: slurmd starts jobs for their users")
    slurm = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.close()
