"""What the agent does next: one pure table, (phase, event) -> (state, actions).

No clock, no process, no file: time arrives as an event (`Expired`), effects leave as actions. What restart policy and
hang detection have found also arrives as events (`Cleared`, `Hung`).

    JOINING   the nodes agree on the attempt (one node: at once)
    STARTING  store and ranks are being started
    RUNNING   ranks train
    SETTLING  a rank failed in a way that looks like an echo of another's death; wait for that other one, briefly
    STOPPING  the live ranks were asked to end; at the end of the grace budget they are killed
    WAITING   this node has finished; other nodes still work, and may need this node's store
    CLEARING  no rank is left; the store and what ranks left behind are being ended
    PAUSING   nothing of the attempt is left; the next one is delayed because the last ones made no progress
    DONE      the outcome is known
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gpulaunch.launcher.agent.events import (
    EVENT_TYPES,
    Action,
    Arm,
    Clear,
    Cleared,
    Deadline,
    Disarm,
    Event,
    Expired,
    Finish,
    Hung,
    Join,
    Joined,
    Kill,
    Notice,
    Outcome,
    PeerFailed,
    PeerPreempted,
    PeersDone,
    Phase,
    RankEnded,
    Report,
    Signalled,
    Start,
    Started,
    StartFailed,
    State,
    Stop,
    StoreLost,
    TellPeers,
)

SETTLE_S = 1.0
"""How long to wait for the cause of an echo. The kernel sees a peer's death before its echo, so the cause is late
only by the time between two process exits: milliseconds, here with a wide margin."""
UNKILLABLE_S = 10.0
"""How long a process may take after SIGKILL: in uninterruptible sleep it may never end, and the agent must."""

SIGTERM = 15
Result = tuple[State, tuple[Action, ...]]


def first(*, restarts: int, grace_s: float, failure_grace_s: float = 1.0) -> Result:
    """The beginning of a job. A failure's grace is never longer than the general one."""
    begun = State(
        phase=Phase.JOINING,
        restarts_left=restarts,
        grace_s=grace_s,
        failure_grace_s=min(failure_grace_s, grace_s),
    )
    return begun, (Join(attempt=0),)


def step(state: State, event: Event) -> Result:
    """The state and actions that follow from `event` in `state`. Every pair has an answer."""
    return TABLE[state.phase, type(event)](state, event)


# -- cells


def _ignored(state: State, event: Event) -> Result:
    """The event no longer has an effect, or not yet."""
    return state, ()


def _start(state: State, event: Event) -> Result:
    return replace(state, phase=Phase.STARTING), (Start(attempt=state.attempt),)


def _run(state: State, event: Event) -> Result:
    assert isinstance(event, Started), "table: Started"
    return replace(state, phase=Phase.RUNNING, live=event.ranks), ()


def _stop_what_started(state: State, event: Event) -> Result:
    """The launcher was asked to end, or a peer failed, while the ranks were being started."""
    assert isinstance(event, Started), "table: Started"
    begun = replace(state, live=event.ranks)
    if state.fenced:
        return replace(begun, phase=Phase.STOPPING), (Kill(), Arm(deadline=Deadline.KILL, after_s=UNKILLABLE_S))
    return _stopping(begun, state.signum or SIGTERM)


def _start_failed(state: State, event: Event) -> Result:
    assert isinstance(event, StartFailed), "table: StartFailed"
    failed = replace(state, live=event.ranks, outcome=_worse(state, Outcome.FAILURE), final=state.final or event.final)
    return _stopping(failed, SIGTERM)


def _rank_ended(state: State, event: Event) -> Result:
    """While the ranks work: wait for the rest after a success, end the attempt on a failure, find an echo's cause."""
    assert isinstance(event, RankEnded), "table: RankEnded"
    left = replace(state, live=state.live - {event.local_rank})
    if event.ok:
        return (left, ()) if left.live else _waiting(replace(left, outcome=Outcome.SUCCESS))
    failed = replace(left, outcome=Outcome.FAILURE)
    if event.echo and failed.live:
        return replace(failed, phase=Phase.SETTLING), (Arm(deadline=Deadline.SETTLE, after_s=SETTLE_S),)
    return _stopping(failed, SIGTERM)


def _rank_ended_settling(state: State, event: Event) -> Result:
    assert isinstance(event, RankEnded), "table: RankEnded"
    left = replace(state, live=state.live - {event.local_rank})
    if left.live and (event.ok or event.echo):
        return left, ()
    return _stopping(left, SIGTERM)


def _rank_ended_stopping(state: State, event: Event) -> Result:
    assert isinstance(event, RankEnded), "table: RankEnded"
    left = replace(state, live=state.live - {event.local_rank})
    return (left, ()) if left.live else _clearing(left)


def _store_lost(state: State, event: Event) -> Result:
    return _stopping(replace(state, outcome=_worse(state, Outcome.FAILURE)), SIGTERM)


def _store_lost_starting(state: State, event: Event) -> Result:
    """The ranks being started are notified when they run."""
    return replace(state, outcome=_worse(state, Outcome.FAILURE)), ()


def _hung(state: State, event: Event) -> Result:
    """A rank that waits in a collective does not handle a signal: use a failure's grace."""
    assert isinstance(event, Hung), "table: Hung"
    failed = replace(state, outcome=_worse(state, Outcome.FAILURE), final=state.final or event.final)
    return _stopping(failed, SIGTERM)


def _peer_failed(state: State, event: Event) -> Result:
    assert isinstance(event, PeerFailed), "table: PeerFailed"
    failed = replace(state, outcome=_worse(state, Outcome.PEER_FAILURE), final=state.final or event.final)
    if event.fenced and failed.live:
        return replace(failed, phase=Phase.STOPPING), (Kill(), Arm(deadline=Deadline.KILL, after_s=UNKILLABLE_S))
    if event.saves and failed.live:
        notice = Notice(signum=SIGTERM, within_s=state.grace_s)
        grace = Arm(deadline=Deadline.GRACE, after_s=state.grace_s)
        return replace(failed, phase=Phase.STOPPING), (notice, Stop(signum=SIGTERM), grace)
    return _stopping(failed, SIGTERM)


def _peer_failed_late(state: State, event: Event) -> Result:
    """What is under way here, a start or an end, continues; only whether there will be another attempt changes."""
    assert isinstance(event, PeerFailed), "table: PeerFailed"
    outcome = _worse(state, Outcome.PEER_FAILURE)
    fenced = state.fenced or event.fenced
    return replace(state, outcome=outcome, final=state.final or event.final, fenced=fenced), ()


def _peer_failed_waiting(state: State, event: Event) -> Result:
    """This node had finished, but the others need it again, or the job is given up."""
    assert isinstance(event, PeerFailed), "table: PeerFailed"
    return _clearing(replace(state, outcome=Outcome.PEER_FAILURE, final=state.final or event.final))


def _peer_preempted(state: State, event: Event) -> Result:
    """The ranks of all nodes save together, under the same budget."""
    return _stopping(_told_by_peer(state), SIGTERM)


def _peer_preempted_early(state: State, event: Event) -> Result:
    """No rank of this node has state to save."""
    after, actions = _clearing(_told_by_peer(state))
    return after, (Kill(), *actions)


def _peer_preempted_late(state: State, event: Event) -> Result:
    return replace(state, final=True), ()


def _peers_done(state: State, event: Event) -> Result:
    return _clearing(state)


def _done_without(state: State, event: Event) -> Result:
    """The others have ended the job successfully, while this node waited to take part."""
    return _clearing(replace(state, outcome=Outcome.SUCCESS))


def _fenced_stopping(state: State, event: Event) -> Result:
    """What is under way here continues, unless the others may go on without this node."""
    assert isinstance(event, PeerFailed), "table: PeerFailed"
    late, actions = _peer_failed_late(state, event)
    if not event.fenced:
        return late, actions
    return late, (*actions, Kill(), Arm(deadline=Deadline.KILL, after_s=UNKILLABLE_S))


def _start_failed_pausing(state: State, event: Event) -> Result:
    return _start_failed(replace(state, live=frozenset()), event)


def _signalled(state: State, event: Event) -> Result:
    """The first signal is passed on to the ranks; they have one grace budget."""
    assert isinstance(event, Signalled), "table: Signalled"
    return _stopping(_told(state, event), event.signum)


def _signalled_starting(state: State, event: Event) -> Result:
    """No rank has begun, and some may be starting: end at once what exists."""
    assert isinstance(event, Signalled), "table: Signalled"
    after, actions = _clearing(_told(state, event))
    return after, (Kill(), *actions)


def _signalled_stopping(state: State, event: Event) -> Result:
    """A second signal ends the job now. A first one, after a failure, only prevents the restart."""
    assert isinstance(event, Signalled), "table: Signalled"
    if state.signum:
        return state, (Kill(), Arm(deadline=Deadline.KILL, after_s=UNKILLABLE_S))
    told = replace(state, signum=event.signum, final=True, preempted=event.preempted)
    return told, (TellPeers(ok=False, final=True),)


def _signalled_clearing(state: State, event: Event) -> Result:
    assert isinstance(event, Signalled), "table: Signalled"
    again = bool(state.signum)
    preempted = state.preempted if again else event.preempted
    told = replace(state, signum=state.signum or event.signum, final=True, preempted=preempted)
    return told, ((Clear(gently=False),) if again or state.outcome is Outcome.SUCCESS else ())


def _expired_settling(state: State, event: Event) -> Result:
    return _stopping(state, SIGTERM)


def _expired_stopping(state: State, event: Event) -> Result:
    assert isinstance(event, Expired), "table: Expired"
    if event.deadline is Deadline.KILL:
        return _clearing(replace(state, live=frozenset(), final=True))
    return state, (Kill(), Arm(deadline=Deadline.KILL, after_s=UNKILLABLE_S))


def _cleared(state: State, event: Event) -> Result:
    """After an attempt: end, or try again, at once or after a pause."""
    assert isinstance(event, Cleared), "table: Cleared"
    if state.outcome is Outcome.SUCCESS:
        return replace(state, phase=Phase.DONE), (Finish(outcome=Outcome.SUCCESS),)
    given_up = state if event.again else replace(state, final=True)
    if not _again(given_up):
        tell = (TellPeers(ok=False, final=True),) if _again(state) else ()
        return replace(given_up, phase=Phase.DONE), (*tell, Report(restarting=False), Finish(outcome=state.outcome))
    following = replace(
        state,
        phase=Phase.JOINING,
        attempt=state.attempt + 1,
        restarts_left=state.restarts_left - 1,
        outcome=Outcome.OPEN,
        live=frozenset(),
        peers_told=False,
        fenced=False,
    )
    if event.pause_s > 0:
        pause = Arm(deadline=Deadline.PAUSE, after_s=event.pause_s)
        return replace(following, phase=Phase.PAUSING), (Report(restarting=True), pause)
    return following, (Report(restarting=True), Join(attempt=following.attempt))


def _paused(state: State, event: Event) -> Result:
    assert isinstance(event, Expired), "table: Expired"
    if event.deadline is not Deadline.PAUSE:
        return state, ()
    return replace(state, phase=Phase.JOINING), (Join(attempt=state.attempt),)


# -- what cells share


def _worse(state: State, outcome: Outcome) -> Outcome:
    """The first reason to end is kept."""
    return outcome if state.outcome in (Outcome.OPEN, Outcome.SUCCESS) else state.outcome


def _stopping(state: State, signum: int) -> Result:
    """Ask the live ranks to end, within the grace budget; if none is live, the attempt is over."""
    if not state.live:
        return _clearing(state)
    known, tell = _tell(state)
    asked = state.outcome is Outcome.SIGNAL
    notice = (Notice(signum=signum, within_s=state.grace_s),) if state.preempted else ()
    grace = Arm(deadline=Deadline.GRACE, after_s=state.grace_s if asked else state.failure_grace_s)
    return replace(known, phase=Phase.STOPPING), (*notice, Stop(signum=signum), *tell, grace)


def _clearing(state: State) -> Result:
    known, tell = _tell(state)
    return replace(known, phase=Phase.CLEARING), (*tell, Disarm(), Clear(gently=state.outcome is Outcome.SUCCESS))


def _tell(state: State) -> Result:
    """Tell the other nodes, once and immediately, what ended the attempt here: their ranks wait for ours."""
    if state.peers_told or state.outcome not in (Outcome.FAILURE, Outcome.SIGNAL):
        return state, ()
    told = TellPeers(ok=False, final=not _again(state), preempted=state.preempted)
    return replace(state, peers_told=True), (told,)


def _told(state: State, event: Signalled) -> State:
    """The launcher was asked to end. A rank that died of the same signal a moment earlier is no failure."""
    return replace(state, signum=event.signum, outcome=Outcome.SIGNAL, final=True, preempted=event.preempted)


def _told_by_peer(state: State) -> State:
    """Another node was asked to save and end, and the others know it."""
    return replace(state, outcome=Outcome.SIGNAL, signum=SIGTERM, final=True, preempted=True, peers_told=True)


def _waiting(state: State) -> Result:
    return replace(state, phase=Phase.WAITING), (TellPeers(ok=True, final=False),)


def _again(state: State) -> bool:
    return not state.final and state.restarts_left > 0


def _join_over(state: State, event: Event) -> Result:
    """Nothing runs yet: a signal, or a peer that gives up, ends the job here."""
    if isinstance(event, Signalled):
        return _clearing(_told(state, event))
    return _clearing(replace(state, outcome=Outcome.PEER_FAILURE, final=True))


def _peer_failed_pausing(state: State, event: Event) -> Result:
    assert isinstance(event, PeerFailed), "table: PeerFailed"
    return _join_over(state, event) if event.final else (state, ())


def _started(state: State, event: Event) -> Result:
    return (_run if state.outcome is Outcome.OPEN else _stop_what_started)(state, event)


_Cell = Callable[[State, Event], Result]
_P = Phase
TABLE: dict[tuple[Phase, type], _Cell] = {
    **{(phase, event): _ignored for phase in Phase for event in EVENT_TYPES},
    (_P.JOINING, Joined): _start,
    (_P.JOINING, StartFailed): _start_failed,
    (_P.JOINING, PeerFailed): _join_over,
    (_P.JOINING, PeerPreempted): _peer_preempted_early,
    (_P.JOINING, PeersDone): _done_without,
    (_P.JOINING, Signalled): _join_over,
    (_P.STARTING, Started): _started,
    (_P.STARTING, StartFailed): _start_failed,
    (_P.STARTING, StoreLost): _store_lost_starting,
    (_P.STARTING, PeerFailed): _peer_failed_late,
    (_P.STARTING, PeerPreempted): _peer_preempted_early,
    (_P.STARTING, Signalled): _signalled_starting,
    (_P.RUNNING, RankEnded): _rank_ended,
    (_P.RUNNING, StoreLost): _store_lost,
    (_P.RUNNING, Hung): _hung,
    (_P.RUNNING, PeerFailed): _peer_failed,
    (_P.RUNNING, PeerPreempted): _peer_preempted,
    (_P.RUNNING, Signalled): _signalled,
    (_P.SETTLING, RankEnded): _rank_ended_settling,
    (_P.SETTLING, StoreLost): _store_lost,
    (_P.SETTLING, Hung): _hung,
    (_P.SETTLING, PeerFailed): _peer_failed,
    (_P.SETTLING, PeerPreempted): _peer_preempted,
    (_P.SETTLING, Signalled): _signalled,
    (_P.SETTLING, Expired): _expired_settling,
    (_P.STOPPING, RankEnded): _rank_ended_stopping,
    (_P.STOPPING, PeerFailed): _fenced_stopping,
    (_P.STOPPING, PeerPreempted): _peer_preempted_late,
    (_P.STOPPING, Signalled): _signalled_stopping,
    (_P.STOPPING, Expired): _expired_stopping,
    (_P.CLEARING, PeerFailed): _peer_failed_late,
    (_P.CLEARING, PeerPreempted): _peer_preempted_late,
    (_P.CLEARING, Signalled): _signalled_clearing,
    (_P.CLEARING, Cleared): _cleared,
    (_P.WAITING, PeerFailed): _peer_failed_waiting,
    (_P.WAITING, PeerPreempted): _peer_preempted,
    (_P.WAITING, PeersDone): _peers_done,
    (_P.WAITING, Signalled): _signalled,
    (_P.PAUSING, StartFailed): _start_failed_pausing,
    (_P.PAUSING, PeersDone): _done_without,
    (_P.PAUSING, PeerFailed): _peer_failed_pausing,
    (_P.PAUSING, PeerPreempted): _peer_preempted_early,
    (_P.PAUSING, Signalled): _join_over,
    (_P.PAUSING, Expired): _paused,
}
