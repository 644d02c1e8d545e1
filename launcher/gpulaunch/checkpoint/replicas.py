"""Which checkpoint the nodes resume from where each has its own directory: found whole on one, sent to the others."""

from __future__ import annotations

from gpulaunch.checkpoint import loading
from gpulaunch.checkpoint.messages import CheckpointError, say, why
from gpulaunch.checkpoint.nodes import Nodes
from gpulaunch.checkpoint.ranks import Ranks
from gpulaunch.checkpoint.store import Keep, StaleError, Store
from gpulaunch.launcher.checkpoint.damaged import Damaged
from gpulaunch.launcher.checkpoint.manifest import Manifest, read, verify


def whole_everywhere(path: str, store: Store, ranks: Ranks, nodes: Nodes, keep: Keep) -> str:
    """The path, on this node, of a checkpoint that every node has whole then; "" if there is none. Called by all ranks.

    Args:
        path: on leaders, the checkpoint that was chosen on this node, "" for none.
        store: the directory of this node, claimed.
        ranks: all of this program.
        nodes: of the job.
        keep: which checkpoints are kept.

    Raises:
        CheckpointError: no node has a whole one, or it cannot be sent.
    """
    path, mine = _checked(path) if nodes.leads else ("", None)
    wanted = any(ranks.gather(bool(path)))
    found = ranks.gather(mine)
    if wanted and not any(found):  # the next older one that any node has whole
        path, mine = _checked(loading.choose({}, store)) if nodes.leads else ("", None)
        found = ranks.gather(mine)
    best = max((each for each in found if each), key=_age, default=None)
    if best is None:
        if wanted:
            raise CheckpointError("cannot resume: no node has a whole checkpoint; start from scratch: --resume never")
        return ""
    source = found.index(best)
    problem = ""
    if nodes.leads and any(found[rank] != best for rank in nodes.leaders):
        path, problem = _send_or_receive(path, best, source, store, nodes, keep, lacks=mine != best)
    problem = nodes.first_problem(problem) if nodes.several else problem
    if problem:
        raise CheckpointError(f"cannot resume: the checkpoint of step {best.step} cannot be copied: {problem}")
    return nodes.from_leader(path)


def _checked(path: str) -> tuple[str, Manifest | None]:
    """`path`, and its manifest if all of it is there and as it was written."""
    if not path:
        return "", None
    try:
        verify(path)
        return path, read(path)
    except Damaged as err:
        say(f"{path} is skipped: {err}")
        return path, None


def _age(manifest: Manifest) -> tuple[int, int, float]:
    return manifest.generation, manifest.step, manifest.saved_s


def _send_or_receive(
    path: str, best: Manifest, source: int, store: Store, nodes: Nodes, keep: Keep, *, lacks: bool
) -> tuple[str, str]:
    """On a leader: (where the checkpoint is on this node, "" or what went wrong)."""
    problem = ""
    if lacks:
        try:
            path = store.begin(best.step)
        except OSError as err:
            path, problem = "", why(err, store.directory)
    files = [(source, file) for file in best.files]
    problem = nodes.exchange(files, path, writes=lacks and not problem) or problem
    if not lacks or problem:
        return path, problem
    try:
        store.commit(path, best, keep, None)
    except (OSError, StaleError) as err:
        return "", why(err, path) if isinstance(err, OSError) else f"the directory was taken over by {err}"
    say(f"step {best.step} was copied from another node to {store.directory}")
    return store.path_of(best.step), ""
