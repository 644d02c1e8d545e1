"""What a signal to the launcher means: end, end after a save, or a save only."""

from __future__ import annotations

import signal
from collections.abc import Callable

from gpulaunch.launcher.agent import events
from gpulaunch.launcher.agent.rank_group import RankGroup
from gpulaunch.launcher.agent.run_context import RunContext
from gpulaunch.launcher.failure.ends import signal_name
from gpulaunch.launcher.loop import child
from gpulaunch.profiler.channel.control import ControlWriter

_ONE_NOTICE_S = 5.0
"""Signals of one kind within this time are one notice: at the time limit Slurm sends SIGTERM twice."""


class Signals:
    """Handles signals from its construction on."""

    def __init__(
        self,
        context: RunContext,
        *,
        control: ControlWriter,
        say: Callable[[str], None],
        state: Callable[[], events.State],
        group: Callable[[], RankGroup | None],
        listening: Callable[[], bool],
        happened: Callable[[events.Event], None],
    ) -> None:
        """`control`: the segment from which ranks read requests; `listening`: whether a rank reads it."""
        self._context = context
        self._spec = context.spec
        self._loop = context.loop
        self._control = control
        self._say = say
        self._state = state
        self._group = group
        self._listening = listening
        self._happened = happened
        self.first_s: float | None = None
        """When the first signal to end arrived."""
        self._save_asked_s = 0.0
        for name in (*self._spec.signals, *self._spec.preempt_signals):
            self._loop.on_signal(signal.Signals[name], self._end)
        for name in self._spec.notify_signals:
            self._loop.on_signal(signal.Signals[name], self._save)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, child.NOTICES)  # blocked since the first line of main

    def notice(self, action: events.Notice) -> None:
        """Tell the ranks, through their segment, to save and to end."""
        self._control.preempt(action.signum, round((self._loop.now() + action.within_s) * 1e9))

    def stop(self, signum: int) -> None:
        """Pass the signal on to the ranks."""
        group = self._group()
        if group is None:
            return
        if self._state().preempted:
            group.request_save(signum, told=self._listening())
        else:
            self._control.leave(True)  # before the signal: its handlers read this
            group.stop(signum)

    def attempt_began(self, captured_s: float) -> None:
        """No request to leave, or to save and exit, is pending any more; a save only if none was made since.

        `captured_s`: when the state in the newest checkpoint that a rank reported was captured; 0.0: no report.
        """
        self._control.leave(False)
        self._control.withdraw()
        if captured_s > self._save_asked_s:
            self._control.forget_saves()

    def _end(self, signum: int) -> None:
        name, state, now_s = signal_name(signum), self._state(), self._loop.now()
        if state.phase is events.Phase.DONE:  # there are no ranks to ask
            self._happened(events.Signalled(signum=signum))
            return
        preempted = name in self._spec.preempt_signals
        before_s, self.first_s = self.first_s, now_s if self.first_s is None else self.first_s
        if preempted and state.preempted and (before_s is None or now_s - before_s < _ONE_NOTICE_S):
            # Two signals of a job manager, or one here and one from another node, are one notice.
            self._context.rundir.event("signalled", signal=name, preempted=True, again=True)
            return
        if state.signum:
            self._say(f"{name} again: ending immediately")
        else:
            to = "save at their next step and end" if preempted and self._listening() else "end"
            at_most = f"{self._spec.grace_s:g} s at most, and a second signal ends them immediately"
            self._say(f"{name}: asked the ranks to {to}; {at_most}")
        self._context.rundir.event("signalled", signal=name, preempted=preempted)
        self._happened(events.Signalled(signum=signum, preempted=preempted))

    def _save(self, signum: int) -> None:
        """Independent of the state: the running ranks may save, and continue."""
        self._say(f"{signal_name(signum)}: asked the ranks to save at their next step and continue")
        self._context.rundir.event("save_requested", signal=signal_name(signum))
        self._save_asked_s = self._loop.now()
        self._control.request_save()
        group = self._group()
        if group is not None:
            group.forward_signal(signum)
