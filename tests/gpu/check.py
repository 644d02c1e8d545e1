"""What only a machine with an NVIDIA GPU can show: `python tests/gpu/check.py --out result.json`.

Runs from the source tree, with torch, psutil, pynvml and prometheus-client installed and gpulaunch not. Each check is a
function that gives {"ok": ..., and what it measured}; one that breaks does not stop the others. Without a GPU it
writes {"skipped": why} and exits 0; else it exits 0 if all checks are ok, and 1 if not.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TRAIN = str(HERE / "train.py")
GPULAUNCH = (sys.executable, "-m", "gpulaunch.launcher.cli.main")
MARKER = "CHECK_OF_GPULAUNCH"
BUDGET_S = 420.0
RUN_TIMEOUT_S = 90.0
MIB = 1 << 20
GIB = 1 << 30

Result = dict[str, Any]


class Bench:
    """One check's surroundings: a directory of its own, the environment, and the runs it makes there."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.reports = directory / "reports"
        self.reports.mkdir()
        self.python_path = [str(ROOT / slice_) for slice_ in ("launcher", "profiler", "exporters")]

    def install_entry_point(self) -> None:
        """Make torch find our entry point, as an installed gpulaunch would: spawned ranks are armed by it."""
        info = self.directory / "site" / "gpulaunch-0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gpulaunch\nVersion: 0\n")
        (info / "entry_points.txt").write_text("[torch.backends]\ngpulaunch = gpulaunch.profiler.probe.inject:arm\n")
        self.python_path.append(str(self.directory / "site"))

    def program(self, source: str) -> str:
        """Write a rank's program."""
        path = self.directory / "program.py"
        path.write_text(source)
        return str(path)

    def environ(self) -> dict[str, str]:
        """What a run, and what is asked about it, is started with."""
        env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        return env | {"PYTHONPATH": os.pathsep.join(self.python_path), "REPORT_DIR": str(self.reports), MARKER: "1"}

    def ask(self, *args: str) -> subprocess.CompletedProcess[str]:
        """`gpulaunch *args` to its end, beside a run that is under way or after it."""
        return subprocess.run(
            [*GPULAUNCH, *args],
            cwd=self.directory,
            env=self.environ(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
            check=False,
        )

    @contextmanager
    def started(self, *args: str) -> Iterator[subprocess.Popen[str]]:
        """`gpulaunch *args`, under way; output in `out` and `err`; killed if it outlives the block."""
        with (self.directory / "out").open("w") as out, (self.directory / "err").open("w") as err:
            process = subprocess.Popen(
                [*GPULAUNCH, *args],
                cwd=self.directory,
                env=self.environ(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                text=True,
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()

    def run(self, *args: str) -> tuple[int, float]:
        """`gpulaunch *args` to its end: exit code, and when it was started (monotonic)."""
        begin = time.monotonic()
        with self.started(*args) as process:
            try:
                return process.wait(RUN_TIMEOUT_S), begin
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"still running after {RUN_TIMEOUT_S:.0f} s: {self.output()}") from None

    def output(self) -> str:
        """The end of what the run said."""
        return "\n".join((self.directory / name).read_text()[-2000:] for name in ("out", "err"))

    def report(self, rank: int) -> Result:
        """What train.py's rank wrote."""
        path = self.reports / f"rank-{rank}.json"
        if not path.exists():
            raise RuntimeError(f"rank {rank} wrote no report: {self.output()}")
        content: Result = json.loads(path.read_text())
        return content

    def wait_for_reports(self, process: subprocess.Popen[str], count: int) -> None:
        """Wait until all ranks have trained."""
        until(lambda: len(list(self.reports.glob("rank-*.json"))) == count or process.poll() is not None)
        for rank in range(count):
            self.report(rank)

    def failure(self) -> Result:
        """failure.json of the last attempt."""
        path = sorted(self.directory.glob("gpulaunch-runs/*/attempts/*/failure.json"))[-1]
        content: Result = json.loads(path.read_text())
        return content


def until(condition: Callable[[], bool], timeout_s: float = RUN_TIMEOUT_S) -> float:
    """Wait for something outside our control; give the seconds it took."""
    begin = time.monotonic()
    while not condition():
        if time.monotonic() - begin > timeout_s:
            raise RuntimeError(f"waited {timeout_s:.0f} s in vain")
        time.sleep(0.02)
    return time.monotonic() - begin


def ours() -> list[int]:
    """Processes of the runs of this check."""
    wanted = f"{MARKER}=1".encode()
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue  # gone, or not ours to read
    return found


def gpu_used_bytes() -> int:
    """Memory in use on GPU 0, by anybody, as NVML says."""
    import pynvml

    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)


def gpu_total_bytes() -> int:
    """Memory of GPU 0."""
    import pynvml

    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).total)


# --- the checks ---------------------------------------------------------------------------------------------------


def nccl_on_one_gpu(bench: Bench) -> Result:
    """DDP over NCCL in a forked rank; the fork server, which imported torch, has not opened the GPU driver."""
    hold = bench.directory / "go"
    begin = time.monotonic()
    with bench.started("--nproc", "1", TRAIN, "--backend", "nccl", "--hold", str(hold)) as process:
        bench.wait_for_reports(process, 1)
        servers = [pid for pid in ours() if Path(f"/proc/{pid}/comm").read_text().startswith("gpulaunch-fork")]
        links = [os.readlink(fd) for pid in servers for fd in Path(f"/proc/{pid}/fd").iterdir()]
        hold.touch()
        code = process.wait(RUN_TIMEOUT_S)
    report = bench.report(0)
    nvidia_files = [link for link in links if link.startswith("/dev/nvidia")]
    return {
        "ok": code == 0
        and report["forked"]
        and not report["cuda_initialized_at_start"]
        and report["last_loss"] < report["first_loss"]
        and len(servers) == 1
        and not nvidia_files,
        "code": code,
        "command_to_first_step_s": report["first_step_at_s"] - begin,
        "fork_servers": len(servers),
        "nvidia_files_of_fork_server": nvidia_files,
        **report,
    }


def two_ranks_share_a_gpu(bench: Bench) -> Result:
    """Two forked ranks on one GPU agree on the weights, over gloo."""
    return _two_ranks(bench, "fork")


def two_spawned_ranks_share_a_gpu(bench: Bench) -> Result:
    """The same with ranks that are started as fresh interpreters."""
    return _two_ranks(bench, "spawn")


def _two_ranks(bench: Bench, start_method: str) -> Result:
    options = ["--nproc", "2", "--gpus", "0", "--start-method", start_method]
    code, begin = bench.run(*options, TRAIN, "--backend", "gloo")
    reports = [bench.report(rank) for rank in (0, 1)]
    return {
        "ok": code == 0
        and all(each["forked"] == (start_method == "fork") for each in reports)
        and all(each["weights_equal_rank_0"] for each in reports)
        and all(each["last_loss"] < each["first_loss"] for each in reports),
        "code": code,
        "command_to_first_step_s": max(each["first_step_at_s"] for each in reports) - begin,
        "ranks": reports,
    }


MEMORY_PROGRAM = """
import json, os, torch
total = torch.cuda.get_device_properties(0).total_memory
below = torch.empty(int(0.02 * total), dtype=torch.uint8, device="cuda")
try:
    above = torch.empty(int(0.06 * total), dtype=torch.uint8, device="cuda")
    stopped = ""
except torch.OutOfMemoryError as error:
    stopped = str(error).splitlines()[0]
with open(os.path.join(os.environ["REPORT_DIR"], "rank-0.json"), "w") as file:
    json.dump({"total_bytes": total, "stopped": stopped}, file)
"""


def memory_fraction_caps(bench: Bench) -> Result:
    """--gpu-memory-fraction 0.05: 2 % of the memory can be had, 6 % more cannot, forked and spawned."""
    bench.install_entry_point()
    program = bench.program(MEMORY_PROGRAM)
    result: Result = {"ok": True}
    for method in ("fork", "spawn"):
        code, _ = bench.run("--nproc", "1", "--gpu-memory-fraction", "0.05", "--start-method", method, program)
        report = bench.report(0)
        result[method] = {"code": code, **report}
        result["ok"] = result["ok"] and code == 0 and "out of memory" in report["stopped"]
        (bench.reports / "rank-0.json").unlink()
    code, _ = bench.run("--nproc", "1", program)
    result["without"] = {"code": code, **bench.report(0)}
    result["ok"] = result["ok"] and bench.report(0)["stopped"] == ""
    return result


def gpus_selects(bench: Bench) -> Result:
    """--gpus with the last GPU: the rank sees that one only. A GPU that is not there is a usage error."""
    import pynvml

    last = pynvml.nvmlDeviceGetCount() - 1
    code, _ = bench.run("--nproc", "1", "--gpus", str(last), TRAIN, "--backend", "nccl", "--steps", "3")
    report = bench.report(0)
    wrong_code, _ = bench.run("--nproc", "1", "--gpus", str(last + 1), TRAIN, "--backend", "nccl")
    said = (bench.directory / "err").read_text().strip()
    return {
        "ok": (code, report["device_count"], report["visible_devices"]) == (0, 1, str(last))
        and wrong_code == 2
        and len(said.splitlines()) == 1,
        "code": code,
        "visible_devices": report["visible_devices"],
        "device_count": report["device_count"],
        "code_for_a_missing_gpu": wrong_code,
        "said_for_a_missing_gpu": said,
    }


def killed_rank_gives_its_memory_back(bench: Bench) -> Result:
    """A rank with 4 GiB is SIGKILLed in its first attempt; the second trains, and NVML shows the memory free again."""
    ballast_bytes = 4 * GIB
    before_bytes = gpu_used_bytes()
    hold = bench.directory / "go"
    options = ["--nproc", "1", "--max-restarts", "1"]
    train = [TRAIN, "--backend", "nccl", "--die-in-attempt-0", str(ballast_bytes), "--hold", str(hold)]
    with bench.started(*options, *train) as process:
        bench.wait_for_reports(process, 1)
        restarted_bytes = gpu_used_bytes()
        hold.touch()
        code = process.wait(RUN_TIMEOUT_S)
    given_back_s = until(lambda: gpu_used_bytes() <= before_bytes + 64 * MIB, timeout_s=10)
    report = bench.report(0)
    killed_at_s = float(re.findall(r"killed at ([\d.]+)", (bench.directory / "out").read_text())[0])
    return {
        "ok": code == 0 and report["attempt"] == 1 and restarted_bytes < before_bytes + ballast_bytes,
        "code": code,
        "kill_to_first_step_s": report["first_step_at_s"] - killed_at_s,
        "used_before_bytes": before_bytes,
        "used_in_attempt_1_bytes": restarted_bytes,
        "given_back_after_the_end_s": given_back_s,
        "forked": report["forked"],
    }


def out_of_memory_is_named(bench: Bench) -> Result:
    """A rank that asks for more than the GPU has: failure.json and the console name the exception and its kind."""
    program = bench.program(
        'import torch\ndef too_much():\n    return torch.empty(1 << 46, dtype=torch.uint8, device="cuda")\ntoo_much()\n'
    )
    code, _ = bench.run("--nproc", "1", program)
    failure = bench.failure()
    console = (bench.directory / "err").read_text()
    return {
        "ok": code == 1
        and failure["first"]["kind"] == "gpu_oom"
        and "OutOfMemoryError" in console
        and "in too_much" in console,
        "code": code,
        "first": failure["first"],
    }


def metrics_have_gpu_memory(bench: Bench) -> Result:
    """While a forked rank trains, from the source tree, /metrics has its steps and its GPU memory."""
    hold = bench.directory / "go"
    with bench.started("--nproc", "1", TRAIN, "--backend", "nccl", "--steps", "200", "--hold", str(hold)) as process:
        bench.wait_for_reports(process, 1)
        url = re.findall(r"metrics (http://\S+)", (bench.directory / "err").read_text())[0]
        until(lambda: (sample(scrape(url), "gpulaunch_steps_total") or 0) >= 200, timeout_s=20)
        page = scrape(url)
        hold.touch()
        code = process.wait(RUN_TIMEOUT_S)
    states = ("allocated", "reserved", "peak_allocated")
    memory = {state: sample(page, "gpulaunch_gpu_memory_bytes", f'state="{state}"') for state in states}
    cost_s = sample(page, "gpulaunch_profiler_overhead_seconds_total", 'where="trainer"')
    steps = sample(page, "gpulaunch_steps_total")
    return {
        "ok": code == 0 and steps == 200 and all(value and value > 0 for value in memory.values()),
        "code": code,
        "steps": steps,
        "gpu_memory_bytes": memory,
        "probe_us_per_step": None if cost_s is None or not steps else 1e6 * cost_s / steps,
    }


def scrape(url: str) -> str:
    """The metrics page."""
    with urllib.request.urlopen(url, timeout=5) as answer:
        text: str = answer.read().decode()
        return text


def sample(page: str, name: str, label: str = "") -> float | None:
    """The first sample of this name that has this label."""
    for line in page.splitlines():
        if line.startswith((f"{name}{{", f"{name} ")) and label in line:
            return float(line.rpartition(" ")[2])
    return None


def doctor_sees_the_gpu(bench: Bench) -> Result:
    """`gpulaunch doctor --json` names the GPU that NVML names, and finds nothing that fails."""
    import pynvml

    name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))
    name = name if isinstance(name, str) else name.decode()
    code, _ = bench.run("doctor", "--json")
    checks = json.loads((bench.directory / "out").read_text())["checks"]
    about_gpus = [each["value"] for each in checks if "gpu" in each["name"].lower()]
    failed = [f"{each['name']}: {each['value']}" for each in checks if each["status"] == "fail"]
    return {
        "ok": any(name in value for value in about_gpus),
        "code": code,
        "name": name,
        "about_gpus": about_gpus,
        "failed": failed,
    }


def probe_cost(bench: Bench) -> Result:
    """Median step with and without the probe, in pairs of runs, the order alternating. Target: 20 us per step."""
    train = [TRAIN, "--backend", "nccl", "--steps", "1500", "--width", "64"]
    pairs: list[dict[str, float]] = []
    for turn in range(4):
        pair: dict[str, float] = {}
        for label, options in [("with", []), ("without", ["--no-profile"])][:: 1 if turn % 2 else -1]:
            code, _ = bench.run("--nproc", "1", *options, *train)
            if code:
                raise RuntimeError(f"exit {code}: {bench.output()}")
            pair[label] = bench.report(0)["step_us"]
            (bench.reports / "rank-0.json").unlink()
        pairs.append(pair)
    added = [pair["with"] - pair["without"] for pair in pairs]
    return {
        "ok": statistics.median(added) <= 20.0,
        "added_us_per_step": statistics.median(added),
        "added_us_per_pair": added,
        "step_us_with": statistics.median(pair["with"] for pair in pairs),
        "step_us_without": statistics.median(pair["without"] for pair in pairs),
    }


COPYING_PROGRAM = """
import dataclasses, json, os, time, torch
from torch.utils.data import DataLoader
from gpulaunch.profiler.channel import segment

STEPS = 64
model = torch.nn.Linear(256, 1).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
pageable, pinned = torch.ones(8 << 20), torch.ones(8 << 20).pin_memory()
weights = torch.randn(4096, 4096, device="cuda")
began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
own_copy_ms = own_wait_s = 0.0
for batch in DataLoader(torch.ones(STEPS, 256)):
    began.record()
    pageable.to("cuda")
    ended.record()
    pinned.to("cuda", non_blocking=True)
    loss = model(batch.cuda()).mean()
    product = weights
    for _ in range(8):
        product = product @ weights
    asked = time.perf_counter()
    product[0, 0].item()
    own_wait_s += time.perf_counter() - asked
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    back = pageable[:1024].to("cuda").cpu()
    own_copy_ms += began.elapsed_time(ended)
with segment.SegmentReader(f"{os.environ['GPULAUNCH_CHANNEL_DIR']}/rank-0.bin") as reader:
    seen, sites = reader.read(), reader.sites()
with open(os.path.join(os.environ["REPORT_DIR"], "rank-0.json"), "w") as file:
    json.dump({
        "copies": {" ".join(key).strip(): dataclasses.asdict(copies) for key, copies in seen.copies.items()},
        "syncs": {kind: dataclasses.asdict(waits) for kind, waits in seen.syncs.items() if waits.calls},
        "sites": [[row.kind, row.text, row.count, row.size_bytes] for row in sites],
        "phase_s": {phase: ns / 1e9 for phase, ns in seen.phase_ns.items()},
        "step_s": seen.step_ns_total / 1e9,
        "gpu_timed_steps": seen.gpu_time.steps,
        "gpu_step_s": seen.gpu_time.step_ns_total / 1e9,
        "gpu_phases_s": sum(
            (seen.gpu_time.forward_ns_total, seen.gpu_time.backward_ns_total, seen.gpu_time.optimizer_ns_total)
        ) / 1e9,
        "pinned_bytes": seen.gpu.pinned_bytes,
        "armed": str(seen.hooks_armed), "fault": seen.fault,
        "own_copy_s": own_copy_ms / 1e3, "own_wait_s": own_wait_s,
    }, file)
"""


def copies_and_waits_are_counted(bench: Bench) -> Result:
    """Every copy and every wait of a program by direction, memory and line; times agree with the program's own."""
    code, _ = bench.run("--nproc", "1", bench.program(COPYING_PROGRAM))
    report = bench.report(0)
    copies, syncs = report["copies"], report["syncs"]
    copy_ratio = copies["h2d pageable"]["gpu_ns"] / 1e9 / report["own_copy_s"]
    wait_ratio = syncs["item"]["blocked_ns"] / 1e9 / report["own_wait_s"]
    return {
        # The model; then each step 32 MiB, a batch, and 4 KiB that come back.
        "ok": code == 0
        and (copies["h2d pageable"]["count"], copies["h2d pinned"]["count"]) == (1 + 3 * 64, 64)
        and copies["h2d pageable"]["size_bytes"] == 4 * 257 + 64 * ((32 << 20) + 1024 + 4096)
        and copies["h2d pinned"]["size_bytes"] == 64 * (32 << 20)
        and (copies["d2h pageable"]["count"], copies["d2h pageable"]["size_bytes"]) == (64, 64 * 4096)
        and (syncs["item"]["calls"], syncs["cpu"]["calls"]) == (64, 64)
        and 0.5 < copy_ratio < 2.0
        and 0.8 < wait_ratio < 1.25
        and report["gpu_timed_steps"] >= 3
        and 0 < report["gpu_phases_s"] < report["gpu_step_s"]
        and report["phase_s"]["sync"] > 0.5 * report["own_wait_s"]
        and report["pinned_bytes"] >= 32 << 20
        and all(name in report["armed"] for name in ("COPIES", "SYNCS", "GPU_TIME"))
        and report["fault"] == "",
        "code": code,
        "copy_gpu_time_to_the_programs_own": copy_ratio,
        "wait_to_the_programs_own": wait_ratio,
        **report,
    }


WAITING_PROGRAM = """
import dataclasses, json, os, torch
from torch.utils.data import DataLoader
from gpulaunch.profiler.channel import segment

model = torch.nn.Linear(256, 1).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
flags, event = torch.ones(4, device="cuda"), torch.cuda.Event()
far, near, pinned = torch.ones(1 << 20, device="cuda"), torch.ones(1 << 20), torch.ones(1 << 20).pin_memory()
for batch in DataLoader(torch.ones(64, 256)):
    loss = model(batch.cuda()).mean()
    bool(flags[0])
    flags.tolist()
    flags.nonzero()
    torch.cuda.synchronize()
    torch.cuda.current_stream().synchronize()
    event.record()
    event.synchronize()
    far.copy_(near)
    far.copy_(pinned, non_blocking=True)
    pinned.copy_(far, non_blocking=True)
    pinned.copy_(far)
    near.copy_(far)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
seen = segment.read(f"{os.environ['GPULAUNCH_CHANNEL_DIR']}/rank-0.bin")
with open(os.path.join(os.environ["REPORT_DIR"], "rank-0.json"), "w") as file:
    json.dump({
        "copies": {
            " ".join(key): [copies.count, copies.size_bytes] for key, copies in seen.copies.items() if copies.count
        },
        "calls": {kind: waits.calls for kind, waits in seen.syncs.items() if waits.calls},
        "step_s": seen.step_ns_total / 1e9,
        "phase_s": {phase: ns / 1e9 for phase, ns in seen.phase_ns.items()},
        "fault": seen.fault,
    }, file)
"""


def every_kind_of_wait_and_of_copy_is_counted(bench: Bench) -> Result:
    """What copies_and_waits_are_counted has not: the other ways to wait, copy_, and copies to pinned memory."""
    code, _ = bench.run("--nproc", "1", bench.program(WAITING_PROGRAM))
    report = bench.report(0)
    wanted_copies = {
        "h2d pageable": [1 + 2 * 64, 4 * 257 + 64 * (1024 + 4 * MIB)],  # the model, batches, near
        "h2d pinned": [64, 64 * 4 * MIB],
        "d2h pageable": [2 * 64, 64 * (4 * MIB + 16)],  # a list brings its values, too
        "d2h pinned": [2 * 64, 2 * 64 * 4 * MIB],
    }
    # Of the three copies to the CPU, the one to pinned memory that was asked not to wait does not.
    wanted_calls = {"bool": 64, "tolist": 64, "nonzero": 64, "synchronize": 3 * 64, "cpu": 2 * 64}
    return {
        "ok": code == 0
        and report["copies"] == wanted_copies
        and report["calls"] == wanted_calls
        and min(report["phase_s"]["h2d"], report["phase_s"]["sync"]) > 0
        and abs(sum(report["phase_s"].values()) - report["step_s"]) < 0.02 * report["step_s"]
        and report["fault"] == "",
        "code": code,
        "wanted_copies": wanted_copies,
        "wanted_calls": wanted_calls,
        **report,
    }


PINNING_PROGRAM = """
import json, os, time, torch
from torch.utils.data import DataLoader, Dataset
from gpulaunch.profiler.channel import segment

STEPS = 64
class Data(Dataset):
    def __len__(self):
        return 8 * STEPS
    def __getitem__(self, index):
        return torch.ones(1 << 17)
model = torch.nn.Linear(1 << 17, 1).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
workers = ready = 0
with segment.SegmentReader(f"{os.environ['GPULAUNCH_CHANNEL_DIR']}/rank-0.bin") as reader:
    for batch in DataLoader(Data(), batch_size=8, num_workers=2, pin_memory=True):
        assert batch.is_pinned()
        time.sleep(0.05)  # slower than the workers: batches pile up behind the thread that pins
        model(batch.to("cuda", non_blocking=True)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        now = reader.read()
        workers, ready = max(workers, now.loader.workers_configured), max(ready, now.loader.ready)
    seen = reader.read()
with open(os.path.join(os.environ["REPORT_DIR"], "rank-0.json"), "w") as file:
    json.dump({
        "steps": seen.steps, "samples": seen.samples, "batches": seen.loader.batches, "workers": workers,
        "most_ready": ready, "pinned_copies": seen.copies["h2d", "pinned"].count,
        "pinned_copied_bytes": seen.copies["h2d", "pinned"].size_bytes, "pinned_bytes": seen.gpu.pinned_bytes,
        "wait_s": seen.loader.wait_ns_total / 1e9, "transfer_s": seen.loader.transfer_ns_total / 1e9,
        "armed": str(seen.hooks_armed), "fault": seen.fault,
    }, file)
"""


def batches_that_a_thread_pins_are_counted(bench: Bench) -> Result:
    """Workers, and the thread that pins what they deliver: its queue is read, and its batches go over as pinned."""
    code, _ = bench.run("--nproc", "1", bench.program(PINNING_PROGRAM))
    report = bench.report(0)
    batch_bytes = 8 * (4 << 17)
    return {
        "ok": code == 0
        and (report["steps"], report["samples"], report["batches"], report["workers"]) == (64, 512, 64, 2)
        and report["most_ready"] >= 1
        and (report["pinned_copies"], report["pinned_copied_bytes"]) == (64, 64 * batch_bytes)
        and report["pinned_bytes"] >= batch_bytes
        and 0 < report["transfer_s"] <= report["wait_s"]
        and all(name in report["armed"] for name in ("LOADER_QUEUE", "SAMPLES", "GPU_MEMORY", "COPIES"))
        and report["fault"] == "",
        "code": code,
        **report,
    }


TRACED_PROGRAM = """
import os, time, torch

STOP, READY = (os.path.join(os.environ["REPORT_DIR"], name) for name in ("stop", "rank-0.json"))
model = torch.nn.Linear(256, 1).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
source, back = torch.ones(2, 8 << 20).pin_memory()
until_s, steps = time.monotonic() + 80, 0
while not os.path.exists(STOP) and time.monotonic() < until_s:
    far = source.to("cuda", non_blocking=True)
    back.copy_(far, non_blocking=True)
    model(torch.ones(16, 256, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    time.sleep(0.01)
    steps += 1
    if steps == 50:
        with open(READY, "w") as file:
            file.write("{}")
"""


def a_trace_agrees_with_the_ledger(bench: Bench) -> Result:
    """A running job is traced: what the GPU copied in the window, by Kineto and by the probe, is the same."""
    with bench.started("--nproc", "1", bench.program(TRACED_PROGRAM)) as process:
        bench.wait_for_reports(process, 1)
        traced = bench.ask("trace", "--duration", "2s", "--what", "memcpy")
        (bench.reports / "stop").touch()
        code = process.wait(RUN_TIMEOUT_S)
    found = sorted(bench.directory.glob("gpulaunch-runs/*/traces/*/trace.json"))
    if not found:
        raise RuntimeError(f"no trace: {traced.stdout[-1000:]}{traced.stderr[-1000:]}")
    (rank,) = json.loads(found[-1].read_text())["ranks"]
    shares = {
        direction: copied["ledger_bytes"] / copied["traced_bytes"] for direction, copied in rank["copied"].items()
    }
    return {
        # The ledger is read within 0.1 s of the window's ends, and a few steps are made without it.
        "ok": (code, traced.returncode) == (0, 0)
        and shares.keys() >= {"h2d", "d2h"}
        and all(0.8 < share < 1.2 for direction, share in shares.items() if direction in ("h2d", "d2h")),
        "code": code,
        "code_of_trace": traced.returncode,
        "ledger_to_trace": shares,
        **rank,
    }


FOUND_PROGRAM = """
import os, sys, time, torch

fixed = sys.argv[1] == "fixed"
model = torch.nn.Linear(256, 1).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
source, weights = torch.ones(16 << 20), torch.randn(4096, 4096, device="cuda")
source = source.pin_memory() if fixed else source
until_s, total, steps = time.monotonic() + 20, torch.zeros((), device="cuda"), 0
while time.monotonic() < until_s:
    far = source.to("cuda", non_blocking=fixed)  # the copy
    product = weights
    for _ in range(8):
        product = product @ weights * 1e-3
    loss = model(far[:4096].view(16, 256)).mean() + 0 * product[0, 0]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if fixed:
        total += loss.detach()
    else:
        loss.item()  # the wait
    time.sleep(0.02)
    steps += 1
    if fixed and steps % 8 == 0:
        total.item()  # or the GPU would fall behind without end
"""


def slow_lines_are_found(bench: Bench) -> Result:
    """A wait at every step and a copy from pageable memory: both lines are found; and nothing of it once repaired."""
    program = bench.program(FOUND_PROGRAM)
    lines = {mark: number for number, line in enumerate(FOUND_PROGRAM.splitlines(), 1) for mark in ("copy", "wait")
             if line.endswith(f"# the {mark}")}  # fmt: skip
    found: dict[str, list[list[Any]]] = {}
    codes: list[int] = []
    for how in ("planted", "fixed"):
        run_dir = str(bench.directory / how)
        code, _ = bench.run("--nproc", "1", "--job-dir", run_dir, program, how)
        told = bench.ask("report", "--json", run_dir)
        codes += [code, told.returncode]
        found[how] = [[each["rule"], each["line"]] for each in json.loads(told.stdout)["findings"]]
    planted = [["sync-every-step", lines["wait"]], ["unpinned-copies", lines["copy"]]]
    repaired = {"sync-every-step", "unpinned-copies", "blocking-copies", "tensor-built-on-cpu"}
    return {
        "ok": not any(codes)
        and all(each in found["planted"] for each in planted)
        and not any(rule in repaired for rule, _ in found["fixed"]),
        "codes": codes,
        "planted": planted,
        "found": found,
    }


SNAPSHOT_PROGRAM = """
import json, os, pickle, torch
from gpulaunch.profiler.channel import segment

held = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
try:
    torch.empty(1 << 46, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    pass
directory = os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"])
with open(os.path.join(directory, "gpu-memory.pickle"), "rb") as file:
    snapshot = pickle.load(file)
seen = segment.read(f"{os.environ['GPULAUNCH_CHANNEL_DIR']}/rank-0.bin")
with open(os.path.join(os.environ["REPORT_DIR"], "rank-0.json"), "w") as file:
    json.dump({
        "largest_segment_bytes": max(segment["total_size"] for segment in snapshot["segments"]),
        "ooms": seen.gpu.ooms,
        "allocated_bytes": seen.gpu.allocated_bytes,
    }, file)
"""


def out_of_memory_leaves_a_snapshot(bench: Bench) -> Result:
    """When memory runs out, what the allocator holds is beside the error file, and its figures are in the page."""
    code, _ = bench.run("--nproc", "1", bench.program(SNAPSHOT_PROGRAM))
    report = bench.report(0)
    return {
        "ok": code == 0
        and report["largest_segment_bytes"] >= 1 << 30
        and report["ooms"] >= 1
        and report["allocated_bytes"] >= 1 << 30,
        "code": code,
        **report,
    }


GRAPH_PROGRAM = """
import json, os, torch
from torch.utils.data import DataLoader
from gpulaunch.profiler.channel import segment

model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
static = torch.ones(16, 256, device="cuda")
def step():
    optimizer.zero_grad(set_to_none=True)
    loss = (model(static) - 1).square().mean()
    loss.backward()
    optimizer.step()
    return loss
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    first = step().item()
    for _ in range(39):
        step()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):  # the 41st step, which would have been timed on the GPU
    loss = step()
for batch in DataLoader(torch.ones(16 * 64, 256), batch_size=16, pin_memory=True):
    static.copy_(batch, non_blocking=True)
    graph.replay()
compiled = torch.compile(model, backend="cudagraphs")
for _ in range(64):
    optimizer.zero_grad(set_to_none=True)
    (compiled(static) - 1).square().mean().backward()
    optimizer.step()
seen = segment.read(f"{os.environ['GPULAUNCH_CHANNEL_DIR']}/rank-0.bin")
with open(os.path.join(os.environ["REPORT_DIR"], "rank-0.json"), "w") as file:
    json.dump({
        "first_loss": first, "last_loss": loss.item(), "steps": seen.steps,
        "pinned_copies": seen.copies["h2d", "pinned"].count,
        "gpu_timed_steps": seen.gpu_time.steps, "unavailable": str(seen.hooks_unavailable), "fault": seen.fault,
    }, file)
"""


def graphs_are_captured_as_ever(bench: Bench) -> Result:
    """A step captured as a CUDA graph while a step is timed, and torch.compile's graphs, with all taps in place."""
    code, _ = bench.run("--nproc", "1", bench.program(GRAPH_PROGRAM))
    report = bench.report(0)
    return {
        "ok": code == 0
        and report["last_loss"] < report["first_loss"]
        and report["pinned_copies"] == 64
        and report["gpu_timed_steps"] >= 2
        and report["fault"] == "",
        "code": code,
        **report,
    }


DEVICE_PROGRAM = """
import json, sys, time
import torch
from gpulaunch.profiler.samplers.nvml.gpus import GpuSampler
from gpulaunch.profiler.samplers.monotonic_totals import MonotonicTotals
from gpulaunch.profiler.samplers.nvml.timeout_guard import Helper

helper = Helper()
sampler = GpuSampler(MonotonicTotals(), helper, patience_s=30.0)
uuid = "GPU-" + str(torch.cuda.get_device_properties(0).uuid)
one = lambda: next(gpu for gpu in sampler.read(time.monotonic()).values if gpu.uuid == uuid)
one()
source = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
copied, spent, errors, capability = 0, [], [], list(torch.cuda.get_device_capability(0))
for _ in range(12):
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        source.to("cuda", non_blocking=True)
        copied += source.numel()
        (a @ a).sum().item()
    began, cpu = time.perf_counter(), time.process_time()
    reading = sampler.read(time.monotonic())
    spent.append((time.perf_counter() - began, time.process_time() - cpu))
    errors += reading.errors
gpu = one()
helper.close()
print(json.dumps({
    "copied_bytes": copied, "pcie_bytes": dict(gpu.pcie_bytes), "energy_joules": gpu.energy_joules,
    "power_watts": gpu.power_watts, "utilization": gpu.utilization_ratio, "gpm": dict(gpu.gpm_ratios),
    "throttle_seconds": dict(gpu.throttle_seconds), "link": [gpu.pcie_generation, gpu.pcie_generation_max,
    gpu.pcie_width, gpu.pcie_width_max], "errors": list(map(str, errors)),
    "capability": capability,
    "reading_wall_s": sorted(wall for wall, _ in spent)[len(spent) // 2],
    "reading_cpu_s": sorted(cpu for _, cpu in spent)[len(spent) // 2],
}))
"""


def device_counters(bench: Bench) -> Result:
    """NVML and GPM as the sidecar reads them, beside a load whose copies are known; and what a reading costs."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(bench.python_path)}
    done = subprocess.run(
        [sys.executable, bench.program(DEVICE_PROGRAM)], env=env, capture_output=True, text=True, timeout=RUN_TIMEOUT_S
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    said: Result = json.loads(done.stdout.splitlines()[-1])
    received = said["pcie_bytes"].get("receive")
    said["pcie_share_seen"] = None if received is None else received / said["copied_bytes"]
    ratios = said["gpm"]
    has_gpm = said["capability"] >= [9, 0]  # from Hopper on; in half of the time, matrices are multiplied in bfloat16
    return {
        "ok": said["utilization"] > 0.5
        and said["energy_joules"] > 0
        and said["errors"] == []
        and bool(ratios) == has_gpm
        and all(0 <= ratio <= 1 for ratio in ratios.values())
        and (not has_gpm or min(ratios["sm_active"], ratios["tensor_active"], ratios["dram_active"]) > 0.01)
        and (received is None or 0.9 < said["pcie_share_seen"] < 1.3),
        **said,
    }


CHECKS: tuple[Callable[[Bench], Result], ...] = (
    nccl_on_one_gpu,
    two_ranks_share_a_gpu,
    two_spawned_ranks_share_a_gpu,
    memory_fraction_caps,
    gpus_selects,
    killed_rank_gives_its_memory_back,
    out_of_memory_is_named,
    metrics_have_gpu_memory,
    doctor_sees_the_gpu,
    copies_and_waits_are_counted,
    every_kind_of_wait_and_of_copy_is_counted,
    batches_that_a_thread_pins_are_counted,
    out_of_memory_leaves_a_snapshot,
    graphs_are_captured_as_ever,
    device_counters,
    a_trace_agrees_with_the_ledger,
    slow_lines_are_found,
    probe_cost,
)


# --- all of them --------------------------------------------------------------------------------------------------


def make(check: Callable[[Bench], Result]) -> Result:
    """One check; whatever goes wrong in it is its result. Nothing of it may be left running."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="check-", ignore_cleanup_errors=True) as directory:
        try:
            result = check(Bench(Path(directory)))
        except Exception:
            result = {"ok": False, "error": traceback.format_exc(limit=-3)}
    try:
        until(lambda: not ours(), timeout_s=5)
    except RuntimeError:
        left = ours()
        result |= {"ok": False, "left_behind": len(left)}
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    return {**result, "took_s": time.monotonic() - begin}


def why_no_gpu() -> str:
    """Why there is nothing to check here, or ""."""
    try:
        import pynvml

        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except Exception as error:  # no library, no driver, no permission: all the same here
        return f"no GPU: {error}"
    return "" if count else "no GPU: NVML finds none"


def machine() -> Result:
    """What the figures were measured on."""
    import pynvml

    versions = "import json, torch; print(json.dumps([torch.__version__, torch.version.cuda]))"
    torch = json.loads(subprocess.run([sys.executable, "-c", versions], capture_output=True, check=True).stdout)
    return {
        "gpu": str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))),
        "gpus": pynvml.nvmlDeviceGetCount(),
        "gpu_memory_bytes": gpu_total_bytes(),
        "driver": str(pynvml.nvmlSystemGetDriverVersion()),
        "torch": torch[0],
        "cuda": torch[1],
        "python": sys.version.split()[0],
        "cores": len(os.sched_getaffinity(0)),
    }


def main() -> int:
    """Make all checks that fit the time, write the result, and give the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("result.json"))
    parser.add_argument("--only", help="names of checks, separated by commas")
    args = parser.parse_args()
    reason = why_no_gpu()
    if reason:
        print(f"skipped: {reason}")
        args.out.write_text(json.dumps({"version": 1, "skipped": reason}) + "\n")
        return 0
    wanted = [check for check in CHECKS if not args.only or check.__name__ in args.only.split(",")]
    deadline_s = time.monotonic() + BUDGET_S
    results: dict[str, Result] = {}
    content: Result = {"version": 1, "machine": machine(), "checks": results}
    for check in wanted:
        late = time.monotonic() > deadline_s
        result = {"ok": False, "error": "not made: out of time"} if late else make(check)
        results[check.__name__] = result
        print(f"{'ok  ' if result['ok'] else 'FAIL'} {check.__name__}: {json.dumps(result)}", flush=True)
        content["ok"] = all(each["ok"] for each in results.values())
        args.out.write_text(json.dumps(content, indent=1) + "\n")  # after each: a run that is cut short leaves the rest
    return 0 if content.get("ok") else 1


if __name__ == "__main__":
    sys.exit(main())
