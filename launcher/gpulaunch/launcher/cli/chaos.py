"""`gpulaunch chaos`: inject faults into an active run on this node, to test its recovery."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence

from gpulaunch.launcher.chaos.faults import DAMAGES, OF_A_RANK, RANDOM, Fault, Verb, choose
from gpulaunch.launcher.chaos.inject import InjectedFault, inject
from gpulaunch.launcher.cli.answer import answer
from gpulaunch.launcher.cli.verb_parser import VerbParser, count, time_s, wants_help
from gpulaunch.launcher.cli.waiting import Activity, show_activity
from gpulaunch.launcher.job.options import UsageError, did_you_mean
from gpulaunch.launcher.runs.events_log import note
from gpulaunch.launcher.runs.find import find_under_way, here
from gpulaunch.launcher.runs.processes import RunError, RunProcesses, agent_of, read_group, take_rank

_HELP = """\
usage: gpulaunch chaos FAULT [RANK] [options]

Injects a fault into an active run on this node, from outside: no code is added to the ranks.

  kill-rank RANK        send it a signal (SIGKILL, or --signal NAME)
  hang-rank RANK        stop it where it is (SIGSTOP); it stays stopped
  slow-rank RANK        stop and continue it repeatedly: --factor 4 times slower, --for 30s
  oom-rank RANK         limit its memory to its present size: its next allocation fails
  kill-loader RANK      kill one of its DataLoader workers
  corrupt-checkpoint    damage the newest checkpoint: --how truncate, flip (one bit) or remove (a file)
  kill-agent, kill-store, kill-fork-server, kill-sidecar
                        kill one of the launcher's other processes
  random                one of these, chosen by --seed, from --faults LIST
                        (default: all but kill-agent)

RANK is a global rank of this node, or `any`: chosen by --seed.

  --job-dir DIR         the run directory (default: the only active run below ./gpulaunch-runs)
  --after TIME          wait first (30s, 2m)
  --every TIME          repeat it at this interval until the run ends
  --times N             at most N times (default: once; with --every, until the run ends)
  --seed N              seed of the random choices (default: random, and printed)

Exit code 0 if a fault was injected, 1 if none could be, 2 for a usage error.
"""
_ANY = "any"
_ALIVE_S = 60.0
"""How long to wait for a missing rank: the job may be starting or restarting."""
_LOOK_S = 0.05
_LONGEST_MS = (1 << 31) - 1
"""The maximum of poll(2): 24 days."""


def run(argv: Sequence[str]) -> int:
    """Inject the requested faults, one line for each, and return the exit code."""
    if not argv or wants_help(argv):
        answer(_HELP)
        return 0
    options = _parse(argv)
    try:
        run_dir = find_under_way(options.job_dir, here())
    except RunError as err:
        raise UsageError(f"chaos: {err}") from None
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 31)
    return _Chaos(options, run_dir, seed).run()


class _Chaos:
    """One call of the command."""

    def __init__(self, options: argparse.Namespace, run_dir: str, seed: int) -> None:
        self._options = options
        self._run_dir = run_dir
        self._seed = seed
        self._rng = random.Random(seed)  # noqa: S311 (chance that can be repeated is the point)
        self._name = options.verb.value if options.verb else "random"
        self._made = 0

    def run(self) -> int:
        agent_pid = agent_of(self._run_dir)
        try:
            agent = os.pidfd_open(agent_pid or 0)
        except OSError:
            raise UsageError(f"chaos: the run in {self._run_dir} has just ended") from None
        try:
            return self._make_all(agent)
        finally:
            os.close(agent)

    def _make_all(self, agent: int) -> int:
        options = self._options
        every_s, times = options.every, options.times
        pause_s = options.after
        for number in range(times or sys.maxsize):
            with show_activity(f"{self._name} is next", lasts_s=pause_s):
                ended = _ended(agent, pause_s)
            if ended:
                self._say(f"the run has ended; {number} of {times or 'any number of'} faults were tried")
                break
            pause_s = every_s or 0.0
            try:
                with show_activity("looking for the ranks") as doing:
                    done = self._make(agent, doing)
            except RunError as err:
                self._say(str(err))
                continue
            self._made += 1
            self._say(f"{done.what} (attempt {done.attempt}, seed {self._seed})")
            _record(self._run_dir, done, self._seed)
            if done.interrupted_by:
                return 128 + done.interrupted_by
        return 0 if self._made else 1

    def _make(self, agent: int, doing: Activity) -> InjectedFault:
        options = self._options
        # Drawn from a separate generator: the random details of one fault must not change the choice of the next.
        rng = random.Random(self._rng.random())  # noqa: S311
        group = self._group(agent, lambda group: bool(group.ranks))
        if options.verb is None:
            fault = choose(rng, options.faults, list(group.ranks), for_s=options.for_s)
        else:
            any_rank = rng.choice(sorted(group.ranks))
            fault = Fault(
                verb=options.verb,
                rank=any_rank if options.rank is None else options.rank,
                signum=options.signal,
                factor=options.factor,
                for_s=options.for_s,
                how=options.how,
            )
        if fault.verb in OF_A_RANK:
            rank = fault.rank
            doing(f"looking for rank {rank}")
            group = self._group(agent, lambda group: rank not in group.ranks or _is_alive(group, rank))
        doing(f"injecting {fault.verb.value}", lasts_s=fault.for_s if fault.verb is Verb.SLOW_RANK else None)
        return inject(fault, group, rng)

    def _group(self, agent: int, fits: Callable[[RunProcesses], bool]) -> RunProcesses:
        """The group as it is, once it fits: the job may be starting or restarting just now."""
        until_s = time.monotonic() + _ALIVE_S
        while True:
            group = read_group(self._run_dir)
            if group is not None and fits(group):
                return group
            if time.monotonic() > until_s or _ended(agent, _LOOK_S):
                raise RunError("no ranks are running: no action was taken")

    def _say(self, what: str) -> None:
        answer(f"{time.strftime('%H:%M:%S')} {self._name}: {what}\n")


def _ended(agent: int, within_s: float) -> bool:
    """Wait this long; return whether the agent has ended."""
    poller = select.poll()
    poller.register(agent, select.POLLIN)
    return bool(poller.poll(min(within_s * 1000, _LONGEST_MS)))


def _is_alive(group: RunProcesses, rank: int) -> bool:
    try:
        with take_rank(group, rank):
            return True
    except RunError:
        return False


def _record(run_dir: str, done: InjectedFault, seed: int) -> None:
    note(
        run_dir,
        "chaos",
        fault=done.fault.verb.value,
        what=done.what,
        pid=done.pid,
        attempt=done.attempt,
        seed=seed,
    )


# -- the arguments

FAULTS = (*(verb.value for verb in Verb), "random")
"""The first word: what to do."""


def words(*, ranks: bool) -> VerbParser:
    """The parser of a fault's arguments; `ranks`: the fault is for one rank."""
    parser = VerbParser("chaos")
    if ranks:
        parser.add_argument("rank", type=_rank)
    parser.add_argument("--job-dir")
    parser.add_argument("--after", type=time_s, default=0.0)
    parser.add_argument("--every", type=time_s)
    parser.add_argument("--times", type=count)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--for", dest="for_s", type=time_s, default=30.0)
    parser.add_argument("--factor", type=_factor, default=4.0)
    parser.add_argument("--signal", type=_signal, default=signal.SIGKILL)
    parser.add_argument("--how", choices=DAMAGES, default=DAMAGES[0])
    parser.add_argument("--faults", type=_verbs, default=RANDOM)
    return parser


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    verbs = {verb.value: verb for verb in Verb}
    name = argv[0]
    if name not in FAULTS:
        raise UsageError(f"chaos: unknown fault {name}{did_you_mean(name, FAULTS)}")
    verb = verbs.get(name)
    parser = words(ranks=verb in OF_A_RANK)
    given = parser.read(argv[1:])
    if given.times is not None and given.times > 1 and given.every is None:
        raise UsageError("chaos: --times requires --every")
    if given.times is None and given.every is None:
        given.times = 1
    given.verb = verb
    given.rank = getattr(given, "rank", None)
    return given


def _rank(text: str) -> int | None:
    if text == _ANY:
        return None
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"expected a rank from 0, or `{_ANY}`, got {text!r}")
    return int(text)


def _factor(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 1 < float(text) <= 1000:
            return float(text)
    raise argparse.ArgumentTypeError(f"expected a number greater than 1 and at most 1000, got {text!r}")


def _signal(text: str) -> int:
    name = text.upper() if text.upper().startswith("SIG") else f"SIG{text.upper()}"
    names = [each.name for each in signal.Signals]
    if name not in names:
        raise argparse.ArgumentTypeError(f"unknown signal {text}{did_you_mean(name, names)}")
    return signal.Signals[name]


def _verbs(text: str) -> tuple[Verb, ...]:
    known = {verb.value: verb for verb in Verb}
    wrong = [word for word in text.split(",") if word not in known]
    if wrong:
        raise argparse.ArgumentTypeError(f"unknown fault {wrong[0] or repr(text)}{did_you_mean(wrong[0], known)}")
    return tuple(known[word] for word in text.split(","))
