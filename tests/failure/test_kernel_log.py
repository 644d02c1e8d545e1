"""Lines of the kernel log, as kernels and drivers write them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.launcher.failure.kernel_log import KernelLog, Xid, victims, xid_evidence, xids

# Recorded on Linux 6.18, as /dev/kmsg gives them.
OOM = """4,848,79120011,-;python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0
6,880,79120700,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,oom_memcg=/x,task=python,pid=812,uid=0
3,881,79120712,-;Memory cgroup out of memory: Killed process 812 (python) total-vm:420400kB, anon-rss:201332kB, \
file-rss:9076kB, shmem-rss:0kB, UID:0 pgtables:500kB oom_score_adj:0
3,882,79120812,-;Out of memory: Killed process 813 (my (odd) name) total-vm:1kB, anon-rss:1kB, UID:0
6,883,79121812,-;oom_reaper: reaped process 812 (python), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB
"""
# From reports: github.com/stas00/ml-engineering, NVIDIA's developer forum; kernel_rc.c of NVIDIA's open driver.
XIDS = """4,1,1,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
4,2,2,-;NVRM: Xid (PCI:0000:10:1c): 63, pid=1896, Row Remapper: New row marked for remapping, reset gpu to activate.
4,3,3,-;NVRM: Xid (PCI:0000:00:06): 31, pid=79749, name=exe, Ch 0000000a, intr 00000000. MMU Fault: ENGINE GRAPHICS
4,4,4,-;NVRM: Xid (PCI:0000:06:00 GPU-I:03): 48, DBE (double bit error)
"""


def test_victims() -> None:
    assert [(one.pid, one.comm) for one in victims(OOM)] == [(812, "python"), (813, "my (odd) name")]
    assert victims(OOM)[0].said == "Memory cgroup out of memory: Killed process 812 (python)"
    assert victims("12,1,1,-;a program wrote: Killed process 812 (python), or so\n") == ()


def test_xids() -> None:
    assert xids(XIDS) == (
        Xid(number=79, card="0000:3b:00", pid=None, said="GPU has fallen off the bus"),
        Xid(
            number=63,
            card="0000:10:1c",
            pid=1896,
            said="Row Remapper: New row marked for remapping, reset gpu to activate",
        ),
        Xid(number=31, card="0000:00:06", pid=79749, said="Ch 0000000a, intr 00000000. MMU Fault: ENGINE GRAPHICS"),
        Xid(number=48, card="0000:06:00", pid=None, said="DBE (double bit error)"),
    )


def test_only_what_is_the_cards_fault_is_evidence() -> None:
    assert xid_evidence(xids(XIDS.splitlines(keepends=True)[0] * 3)) == (
        "the NVIDIA driver reported Xid 79 of GPU 0000:3b:00 (GPU has fallen off the bus)"
    )
    assert xid_evidence(xids(XIDS.splitlines()[2])) is None
    assert xid_evidence(()) is None
    many = [Xid(number=48, card=f"0000:{n:02x}:00", pid=None, said="") for n in range(8)]
    assert str(xid_evidence(many)).endswith("Xid 48 of GPU 0000:03:00 and 4 more")


@given(st.text(), st.text(alphabet="NVRM: Xid(PC0123456789.,pid=<>'\n)"))
def test_whatever_a_log_says_it_is_read(noise: str, near: str) -> None:
    text = f"{noise}NVRM: Xid ({near}\nMemory cgroup out of memory: Killed process {noise}"

    assert all(one.number >= 0 for one in xids(text))
    assert all(one.pid >= 0 for one in victims(text))


def test_only_what_is_said_after_the_start_counts(tmp_path: Path) -> None:
    file = tmp_path / "kmsg"
    file.write_text(OOM)
    log = KernelLog(str(file))
    log.start()
    assert (log.readable, log.text()) == (True, "")

    with file.open("a") as more:
        more.write(XIDS)
    assert len(xids(log.text())) == 4
    assert log.text() == log.text(), "what was read once is remembered"

    log.start()
    assert log.text() == ""
    log.close()


def test_a_log_that_may_not_be_read_says_nothing(tmp_path: Path) -> None:
    log = KernelLog(str(tmp_path / "none"))
    assert log.text() == "", "not started"
    log.start()

    assert (log.readable, log.text()) == (False, "")


@pytest.mark.root
def test_the_real_log_is_read_to_its_end_without_waiting() -> None:
    """What root writes there comes back, as if a driver had said it; a line without an end would be held back."""
    log = KernelLog()
    log.start()
    if not log.readable:
        pytest.skip("this container does not show /dev/kmsg")
    line = f"gpulaunch test: NVRM: Xid (PCI:0000:3b:00): 31, pid={os.getpid()}, name=test, not a fault\n"
    with open("/dev/kmsg", "w") as kernel:
        kernel.write(line)

    assert os.getpid() in [one.pid for one in xids(log.text()) if one.said == "not a fault"]
    log.close()
