"""Lists the changes that may make a job faster, from what a trial of the job as it is has shown. Pure.

A change is listed if what it is about takes a measurable share of the steps: what cannot gain is not tried. Only
settings that leave the results alone are, unless the user allows others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gpulaunch.launcher.tune.change import Change, line_of
from gpulaunch.launcher.tune.measure import LEAST_GAIN
from gpulaunch.launcher.tune.search import Measured

MOST_WORKERS: Final = 16
"""Per rank."""
_WORKERS_PER_CORE: Final = 2
"""More can only help if they mostly wait; then the first that gain lead to more."""
PREFETCH: Final = 2
"""Batches that a worker prepares ahead by torch's default."""
_MORE: Final = 4
_BUCKET_CAP_MB: Final = 100
"""DistributedDataParallel's default is 25."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The job as it is."""

    step_s: float
    facts: Mapping[str, Any]
    """Of rank 0; see `profiler.probe.facts`."""
    findings: Sequence[Mapping[str, Any]]
    """Lines of findings.jsonl, the most urgent first."""
    shares: Mapping[str, float] = field(default_factory=dict[str, float])
    """Of the steps, by phase of `layout.PHASES`."""
    ranks: int = 1
    cores: int = 1
    """That all ranks may use."""
    most_prepared: int = 10_000
    """Batches that workers may have prepared before the first step without being measured."""
    epochs: int = 0
    """That began in the measured steps, after the first one."""
    allow_numerics: bool = False
    """Whether changes may be tried that change the results a little."""

    @property
    def drained_workers(self) -> int:
        """How many per rank have handed out what they had prepared when the measurement begins."""
        return self.most_prepared // PREFETCH


def candidates(seen: Seen) -> list[Change]:
    """Return what to try, the largest predicted saving first, then what no finding predicts."""
    found = [*_workers(seen), *_loader_settings(seen), *_threads(seen), *_ddp(seen), *_pauses(seen), *_gpu(seen)]
    return sorted(found, key=lambda change: -(change.predicted_s or 0.0))


def more_workers(seen: Seen, change: Change, measured: Measured) -> Iterator[Change]:
    """What to try because a number of workers has gained: more, as long as training still waits for data."""
    if measured.waits < LEAST_GAIN:
        return
    for site, settings in change.loaders.items():
        workers = 2 * settings.get("num_workers", 0)
        if 0 < workers <= min(MOST_WORKERS, seen.drained_workers):
            yield Change(loaders={site: {**settings, "num_workers": workers}})


def _training_loaders(seen: Seen) -> Iterator[Mapping[str, Any]]:
    """Those whose line is known: used for training, or named by a finding (one line may make loaders for both)."""
    named = {_place(finding) for finding in seen.findings}
    sites: set[str] = set()
    for loader in seen.facts.get("loaders") or ():
        site = loader.get("site") or ""
        trains = loader.get("split") == "train" or line_of(site) in named
        if site and trains and site not in sites:
            sites.add(site)
            yield loader


def _workers(seen: Seen) -> Iterator[Change]:
    """Workers that persist, and other numbers of them, where training waits for data."""
    if seen.shares.get("data_wait", 0.0) < LEAST_GAIN:
        return
    for loader in _training_loaders(seen):
        site, now = loader["site"], loader.get("num_workers", 0)
        if not now and (loader.get("kind") == "iterable" or loader.get("holds")):
            continue  # workers would each hand out every sample, or share what the dataset holds: see `why_no_workers`
        # Workers that are started anew for every epoch would hide what more of them gain.
        persistent = {"persistent_workers": True} if seen.epochs and not loader.get("changes") else {}
        if now and persistent and not loader.get("persistent_workers"):
            predicted_s, because = _predicted(seen, "dataloader-workers-restarted")
            yield Change(loaders={site: persistent}, predicted_s=predicted_s, because=because)

        def workers_of(number: int, site: str = site, persistent: Mapping[str, Any] = persistent) -> Mapping[str, Any]:
            return {site: {"num_workers": number, **(persistent if number else {})}}

        most = min(MOST_WORKERS, seen.drained_workers, max(2, _WORKERS_PER_CORE * seen.cores // seen.ranks))
        advised = _advised(seen, site)
        if advised is not None:
            workers, predicted_s, rule = advised
            workers = min(workers, seen.drained_workers)
            if workers != now:
                yield Change(loaders=workers_of(workers), predicted_s=predicted_s, because=rule)
        others = {2 * now if now else 2, now // 2, most} - {now, advised[0] if advised else now}
        for workers in sorted(others):
            if 0 < workers <= most:
                yield Change(loaders=workers_of(workers))


def why_no_workers(seen: Seen) -> list[str]:
    """Return a line for each loader without workers that gets none, although training waits for data."""
    if seen.shares.get("data_wait", 0.0) < LEAST_GAIN:
        return []
    told: list[str] = []
    for loader in _training_loaders(seen):
        where = f"{line_of(loader['site'])}: no workers tried"
        if loader.get("num_workers"):
            continue
        if loader.get("kind") == "iterable":
            told.append(f"{where}: each would return every sample of an iterable dataset")
        elif loader.get("holds"):
            told.append(f"{where}: they would share {loader['holds']} of the dataset; open it once per worker")
    return told


def _advised(seen: Seen, site: str) -> tuple[int, float, str] | None:
    """The number of workers that a finding about this loader advises, what it saves, and its rule."""
    for finding in seen.findings:
        evidence = finding.get("evidence", {})
        workers = evidence.get("workers_advised")
        if isinstance(workers, int | float) and _place(finding) in ("", line_of(site)):
            with_s = evidence.get(f"step_seconds_with_{round(workers)}_workers")  # without workers a line may save more
            saved_s = finding["seconds_per_step"] if with_s is None else evidence["step_seconds"] - with_s
            return round(workers), saved_s, finding["rule"]
    return None


def _place(finding: Mapping[str, Any]) -> str:
    return f"{finding['file']}:{finding['line']}" if finding.get("file") and finding.get("line") else ""


def _predicted(seen: Seen, *rules: str) -> tuple[float | None, str]:
    """What the first finding of one of these rules saves of a step, and which rule it is."""
    for finding in seen.findings:
        if finding["rule"] in rules:
            return finding["seconds_per_step"], finding["rule"]
    return None, ""


def _loader_settings(seen: Seen) -> Iterator[Change]:
    waits = seen.shares.get("data_wait", 0.0) >= LEAST_GAIN
    for loader in _training_loaders(seen):
        site, workers = loader["site"], loader.get("num_workers", 0)

        def change(settings: Mapping[str, Any], *rules: str, site: str = site) -> Change:
            predicted_s, because = _predicted(seen, *rules)
            return Change(loaders={site: settings}, predicted_s=predicted_s, because=because)

        if workers and waits:
            if loader.get("in_order", True):
                yield change({"in_order": False}, "dataloader-head-of-line")
            if (loader.get("prefetch_factor") or PREFETCH) < _MORE <= seen.most_prepared // workers:
                yield change({"prefetch_factor": _MORE})
        if seen.facts.get("device") and not loader.get("pin_memory") and seen.shares.get("h2d", 0.0) >= LEAST_GAIN:
            yield change({"pin_memory": True}, "unpinned-copies")


def _threads(seen: Seen) -> Iterator[Change]:
    """On the CPU: as many threads for torch as each rank has cores; torchrun and others set one."""
    now = seen.facts.get("torch_threads")
    fair = max(1, seen.cores // seen.ranks)
    if seen.facts.get("device") is None and isinstance(now, int) and now != fair:
        predicted_s, because = _predicted(seen, "omp-oversubscribed")
        yield Change(torch={"num_threads": fair}, predicted_s=predicted_s, because=because)


def _ddp(seen: Seen) -> Iterator[Change]:
    ddp = seen.facts.get("ddp")
    if not ddp or seen.ranks < 2:
        return
    if not ddp.get("gradient_as_bucket_view"):
        yield Change(ddp={"gradient_as_bucket_view": True})
    if 0 < ddp.get("bucket_cap_bytes", 0) < _BUCKET_CAP_MB << 20:
        yield Change(ddp={"bucket_cap_mb": _BUCKET_CAP_MB})


def _pauses(seen: Seen) -> Iterator[Change]:
    if seen.shares.get("gc", 0.0) >= LEAST_GAIN:
        predicted_s, because = _predicted(seen, "gc-pauses")
        yield Change(gc_freeze=True, predicted_s=predicted_s, because=because)


def _gpu(seen: Seen) -> Iterator[Change]:
    if not seen.facts.get("device"):
        return
    yield Change(torch={"cudnn_benchmark": True})
    precision = seen.facts.get("precision") or {}
    if seen.allow_numerics and precision.get("matmul") == "highest":
        yield Change(torch={"float32_matmul_precision": "high"})
