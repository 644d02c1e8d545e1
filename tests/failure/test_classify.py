"""The rule table: what torch really said when a peer died; for each rule an end that it names and one that it must not."""

# ruff: noqa: E501 - what a library said stays in one piece

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from gpulaunch.launcher.failure import classify as table
from gpulaunch.launcher.failure.classify import ADVICE, RULES, Kind, classify, mentions_peer, root_exception

RECORDED = json.loads((Path(__file__).parent / "recorded.json").read_text())["samples"]
OOM = "the kernel's OOM killer struck in this job's cgroup (limit 8.0 GiB, memory.events: oom_kill 0 -> 1)"
SHM = "/dev/shm has 0 of 64 MiB free"
OTHER_OOM = "the kernel's OOM killer killed another process (Out of memory: Killed process 7 (pt_data_worker))"
XID = "GPU 3 (GPU-5a) reported Xid 79 (the GPU has fallen off the bus)"
ECC = "GPU 3 (GPU-5a) reported 2 uncorrected ECC errors"
PROGRAM_XID = "GPU 3 (GPU-5a) reported Xid 31"
HUNG = "ranks 0-6 wait in all_reduce, rank 3 is in train.py:88 open()"


@pytest.mark.parametrize("sample", RECORDED, ids=[sample["name"] for sample in RECORDED])
def test_recorded_ends(make_end: Any, make_error: Any, sample: dict[str, str]) -> None:
    """Texts of torch 2.13 over gloo, recorded from real runs in which one rank died or a worker died; see `how` in each."""
    error = make_error(sample["type"], sample["message"], traceback=sample["traceback"])

    assert classify(make_end(error=error)) is Kind(sample["kind"]), sample["how"]


@pytest.mark.parametrize("sample", RECORDED, ids=[sample["name"] for sample in RECORDED])
def test_recorded_echoes_printed_by_a_rank_that_was_not_armed(make_end: Any, sample: dict[str, str]) -> None:
    """The same from the last lines alone: an echo is still an echo, and nothing else becomes one."""
    end = make_end(tail=tuple(sample["traceback"].splitlines()[-20:]))

    assert (classify(end) is Kind.PEER) == (sample["kind"] == "peer")


SAID = [
    (Kind.EXCEPTION, "ValueError: bad loss"),
    (Kind.EXCEPTION, "requests.exceptions.ConnectionError: Connection reset by peer"),
    (Kind.EXCEPTION, "ConnectionResetError: [Errno 104] Connection reset by peer"),
    (Kind.EXCEPTION, "BrokenPipeError: [Errno 32] Broken pipe"),
    (Kind.EXCEPTION, "TimeoutError: timed out"),
    # NCCL's words are from reports at github.com/NVIDIA/nccl/issues (2076, 1514) and pytorch's own sources.
    (Kind.PEER, "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268, remote process exited or there was a network error, NCCL version 2.21.5\nncclRemoteError: A call failed"),
    (Kind.PEER, "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1275, internal error\nncclInternalError: Internal check failed.\nLast error:\nNet : Connection closed by remote peer node2<50260>"),
    (Kind.PEER, "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 3."),
    (Kind.EXCEPTION, "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1287, invalid usage\nncclInvalidUsage: This usually reflects invalid usage of NCCL library."),
    (Kind.PEER, "torch.distributed.DistStoreError: Socket Timeout"),
    (Kind.EXCEPTION, "torch.distributed.DistStoreError: key not found"),
    (Kind.PEER, "RuntimeError: sendBytes failed on SocketImpl(fd=3): Broken pipe"),
    (Kind.PEER, "RuntimeError: Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?"),
    (Kind.PEER, "RuntimeError: The client socket has failed to connect to any network address of (node0, 29500)."),
    (Kind.PEER, "RuntimeError: Some NCCL operations have failed or timed out."),
    (Kind.PEER, "RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 2000 ms"),
    (Kind.EXCEPTION, "RuntimeError: [enforce fail at gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 400 vs 40"),
    (Kind.PORT_IN_USE, "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"),
    (Kind.PORT_IN_USE, "OSError: [Errno 98] Address already in use"),
    (Kind.GPU_OOM, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
    (Kind.GPU_OOM, "RuntimeError: CUDA error: out of memory"),
    (Kind.GPU_FAULT, "RuntimeError: CUDA error: device-side assert triggered"),
    (Kind.GPU_FAULT, "RuntimeError: CUDA error: an illegal memory access was encountered"),
    (Kind.GPU_HARDWARE, "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"),
    (Kind.EXCEPTION, "RuntimeError: no CUDA device"),
    (Kind.HOST_OOM, "MemoryError"),
    (Kind.HOST_OOM, "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 8.00 TiB"),
    (Kind.HOST_OOM, "OSError: [Errno 12] Cannot allocate memory"),
    (Kind.EXCEPTION, "ValueError: MemoryError is not what I expected"),
    (Kind.SHM_FULL, "RuntimeError: unable to allocate shared memory(shm) for file </torch_123_4>: No space left on device (28)"),
    (Kind.DISK_FULL, "OSError: [Errno 28] No space left on device: 'ckpt.pt'"),
    (Kind.LOADER_WORKER, "RuntimeError: DataLoader worker (pid(s) 12, 13) exited unexpectedly"),
    (Kind.SYNTAX, "IndentationError: unexpected indent"),
    (Kind.EXCEPTION, "MySyntaxError: no"),
    (Kind.IMPORT, "ModuleNotFoundError: No module named 'nope'"),
    (Kind.IMPORT, "SystemExit: /home/my user/bin/python3: No module named nope"),
    (Kind.IMPORT, "SystemExit: /usr/bin/python3: No code object available for nope"),
    (Kind.IMPORT, "SystemExit: /usr/bin/python3: Error while finding module specification for 'nope.x' (Module"),
    (Kind.EXCEPTION, "ValueError: ImportError: not really"),
    (Kind.EXIT_CODE, "SystemExit: no data"),
    (Kind.PREEMPTED, "gpulaunch.checkpoint.save.Preempted: 75"),
    (Kind.EXCEPTION, "__main__.Preempted: by my colleague"),
    (Kind.CHECKPOINT_IN_USE, "gpulaunch.checkpoint.messages.DirectoryInUse: runs/a is in use by run 3f2a"),
    (Kind.EXCEPTION, "__main__.DirectoryInUse: by my colleague"),
    (Kind.EXIT_CODE, "SystemExit: 69"),
    (Kind.INTERRUPT, "KeyboardInterrupt"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text"), SAID, ids=[text[:60] for _, text in SAID])
def test_what_it_said(make_end: Any, make_error: Any, kind: Kind, text: str) -> None:
    frames = 'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\n    step("MemoryError")\n'
    name, _, message = text.partition(": ")

    assert classify(make_end(error=make_error(name, message, traceback=frames + text + "\n"))) is kind
    assert classify(make_end(error=make_error(name, message, traceback=""))) is kind, "a writer without a traceback"


ENDED: list[tuple[Kind, dict[str, Any]]] = [
    (Kind.STOPPED, {"stopped": True, "signal": signal.SIGTERM}),
    (Kind.SIGNAL, {"signal": signal.SIGTERM}),
    (Kind.STOPPED, {"stopped": True, "signal": signal.SIGKILL, "evidence": (OOM,)}),
    (Kind.HOST_OOM, {"signal": signal.SIGKILL, "evidence": (OOM,)}),
    (Kind.SIGNAL, {"signal": signal.SIGKILL}),
    (Kind.SIGNAL, {"signal": signal.SIGTERM, "evidence": (OOM,)}),
    (Kind.SIGNAL, {"signal": signal.SIGKILL, "tail": ("torch.OutOfMemoryError: CUDA out of memory.",)}),
    (Kind.SIGNAL, {"signal": signal.SIGKILL, "evidence": (OTHER_OOM,)}),
    (Kind.SIGNAL, {"signal": signal.SIGKILL, "evidence": (XID,)}),
    (Kind.GPU_HARDWARE, {"signal": signal.SIGABRT, "evidence": (XID,)}),
    (Kind.GPU_HARDWARE, {"signal": signal.SIGSEGV, "evidence": (ECC,)}),
    (Kind.SEGFAULT, {"signal": signal.SIGSEGV, "evidence": (PROGRAM_XID,)}),
    (Kind.HANG, {"signal": signal.SIGKILL, "hang": HUNG}),
    (Kind.HANG, {"signal": signal.SIGTERM, "hang": HUNG, "evidence": (PROGRAM_XID,)}),
    (Kind.HANG, {"code": 0, "hang": HUNG}),
    (Kind.GPU_HARDWARE, {"signal": signal.SIGKILL, "hang": HUNG, "evidence": (ECC,)}),
    (Kind.HOST_OOM, {"code": 137, "evidence": (OTHER_OOM,)}),
    (Kind.EXIT_CODE, {"code": 137}),
    (Kind.EXIT_CODE, {"code": 3, "tail": ("Preempted: a worker of mine",)}),
    (Kind.SEGFAULT, {"signal": signal.SIGSEGV, "evidence": (SHM,)}),
    (Kind.SHM_FULL, {"signal": signal.SIGBUS, "evidence": (SHM,)}),
    (Kind.BUS_ERROR, {"signal": signal.SIGBUS}),
    (Kind.ABORT, {"signal": signal.SIGABRT, "tail": ("Assertion `x > 0' failed.",)}),
    (Kind.ABORT, {"signal": signal.SIGILL}),
    (Kind.SIGNAL, {"signal": 40}),
    (Kind.INTERRUPT, {"signal": signal.SIGINT}),
    (Kind.EARLY_EXIT_0, {"code": 0}),
    (Kind.STOPPED, {"code": 0, "stopped": True}),
    (Kind.EXIT_CODE, {"code": 3}),
    (Kind.EXIT_CODE, {"code": 3, "tail": ("all is well",)}),
    (Kind.EXIT_CODE, {"code": None}),
    (Kind.EXCEPTION, {"code": 1, "tail": ("Traceback (most recent call last):", "  File ...", "ValueError: x")}),
    (Kind.IMPORT, {"code": 1, "tail": ("Traceback (most recent call last):", "ModuleNotFoundError: no 'x'")}),
]


@pytest.mark.parametrize(("kind", "fields"), ENDED)
def test_how_it_ended(make_end: Any, kind: Kind, fields: dict[str, Any]) -> None:
    assert classify(make_end(**fields)) is kind


def test_an_abort_of_ncclls_watchdog_is_an_echo(make_end: Any) -> None:
    """From github.com/instructlab/training/pull/520: the watchdog throws in C++, and the runtime aborts the process."""
    tail = (
        "terminate called after throwing an instance of 'c10::DistBackendError'",
        "  what():  [PG ID 0 PG GUID 0(default_pg) Rank 3] Process group watchdog thread terminated with exception: [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE) ran for 600090 ms",
    )

    assert classify(make_end(signal=signal.SIGABRT, tail=tail)) is Kind.PEER
    assert classify(make_end(signal=signal.SIGSEGV, tail=tail)) is Kind.SEGFAULT


def test_a_dead_loader_worker_with_an_oom_kill_is_out_of_memory(make_end: Any, make_error: Any) -> None:
    sample = next(sample for sample in RECORDED if sample["name"] == "loader_9-0")
    error = make_error(sample["type"], sample["message"], traceback=sample["traceback"])

    assert classify(make_end(error=error)) is Kind.LOADER_WORKER
    assert classify(make_end(error=error, evidence=(OOM,))) is Kind.HOST_OOM
    assert classify(make_end(error=error, evidence=(OTHER_OOM,))) is Kind.HOST_OOM


@pytest.mark.parametrize(
    ("said", "evidence", "kind"),
    [
        ("RuntimeError: CUDA error: unspecified launch failure", XID, Kind.GPU_HARDWARE),
        ("RuntimeError: CUDA error: unspecified launch failure", PROGRAM_XID, Kind.GPU_FAULT),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", ECC, Kind.GPU_HARDWARE),
        (
            "torch.distributed.DistBackendError: [Rank 3] Watchdog caught collective operation timeout",
            XID,
            Kind.GPU_HARDWARE,
        ),
        ("torch.OutOfMemoryError: CUDA out of memory.", XID, Kind.GPU_OOM),
        ("ValueError: bad loss", XID, Kind.EXCEPTION),
        ("RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer", XID, Kind.PEER),
    ],
)
def test_a_faulty_card_is_to_blame_for_what_only_a_card_can_do(
    make_end: Any, make_error: Any, said: str, evidence: str, kind: Kind
) -> None:
    name, _, message = said.partition(": ")

    assert classify(make_end(error=make_error(name, message, traceback=f"{said}\n"), evidence=(evidence,))) is kind


def test_a_hung_rank_that_had_raised_before_failed_by_its_exception(make_end: Any, make_error: Any) -> None:
    def hung(name: str, message: str, at: float) -> Kind:
        return classify(make_end(signal=9, hang=HUNG, hung_s=120.0, error=make_error(name, message, at=at)))

    assert hung("ValueError", "x", 110.0) is Kind.EXCEPTION
    assert hung("KeyboardInterrupt", "", 121.0) is Kind.HANG, "it raised because it was told to end"
    assert hung("RuntimeError", "[gloo/transport/tcp/pair.cc:553] Connection closed by peer", 110.0) is Kind.HANG


CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
HANDLING = "\nDuring handling of the above exception, another exception occurred:\n\n"
ECHO = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4518\n"


def chain(*texts: str, link: str) -> str:
    return link.join(
        f'Traceback (most recent call last):\n  File "t.py", line 1, in f\n    g()\n{text}' for text in texts
    )


def test_of_a_chain_the_oldest_decides_whether_it_is_an_echo(make_end: Any, make_error: Any) -> None:
    wrapped = make_end(error=make_error("E", "", traceback=chain(ECHO, "StepError: step 7 failed\n", link=CAUSE)))
    cleanup = make_end(error=make_error("E", "", traceback=chain("ValueError: bad\nloss\n", ECHO, link=HANDLING)))

    assert (classify(wrapped), mentions_peer(wrapped)) == (Kind.PEER, False)
    assert (classify(cleanup), mentions_peer(cleanup)) == (Kind.EXCEPTION, True)
    assert root_exception(cleanup.error.traceback) == "ValueError: bad\nloss"


def test_out_of_memory_while_handling_something_else_is_out_of_memory(make_end: Any, make_error: Any) -> None:
    oom = "torch.OutOfMemoryError: CUDA out of memory.\n"

    assert (
        classify(make_end(error=make_error("E", "", traceback=chain("KeyError: 3\n", oom, link=HANDLING))))
        is Kind.GPU_OOM
    )
    assert (
        classify(make_end(error=make_error("E", "", traceback=chain(oom, "MyError: x\n", link=CAUSE)))) is Kind.GPU_OOM
    )
    assert (
        classify(make_end(error=make_error("E", "", traceback=chain("KeyError: 3\n", "MyError: x\n", link=CAUSE))))
        is Kind.EXCEPTION
    )


def test_an_exception_that_aborts_in_teardown_is_still_the_exception(make_end: Any, make_error: Any) -> None:
    """torch 2.13 over gloo aborts in interpreter teardown: the signal comes after the last words."""
    assert classify(make_end(signal=signal.SIGABRT, error=make_error("ValueError", "x"))) is Kind.EXCEPTION


def test_every_line_of_the_table_is_needed(monkeypatch: pytest.MonkeyPatch, make_end: Any, make_error: Any) -> None:
    """Without any one rule, at least one of the ends of this file would get another name."""
    ends = [make_end(**fields) for _, fields in ENDED]
    ends += [make_end(error=make_error("E", "", traceback=f"{text}\n")) for _, text in SAID]
    ends += [make_end(error=make_error("E", "", traceback=sample["traceback"])) for sample in RECORDED]
    loader_killed = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.\n"
    ends.append(make_end(error=make_error("E", "", traceback=loader_killed), evidence=(OOM,)))
    cuda = "RuntimeError: CUDA error: unspecified launch failure\n"
    ends.append(make_end(error=make_error("E", "", traceback=cuda), evidence=(XID,)))
    names = [classify(end) for end in ends]

    def needed(index: int) -> bool:
        monkeypatch.setattr(table, "RULES", RULES[:index] + RULES[index + 1 :])
        try:
            return [classify(end) for end in ends] != names
        except StopIteration:  # no rule fits any more
            return True

    assert [RULES[index] for index in range(len(RULES)) if not needed(index)] == []


def test_every_kind_has_one_sentence_of_advice_and_a_rule() -> None:
    assert set(ADVICE) == set(Kind)
    assert all(text.endswith(".") and "\n" not in text for text in ADVICE.values())
    assert {rule.kind for rule in RULES} == set(Kind) - {Kind.NODE_LOSS}, "a node that is gone leaves no end to judge"
