"""The checkpoint to resume from with `--replicate`: verified by the ranks, and sent to the nodes that lack it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpulaunch.checkpoint import loading
from gpulaunch.checkpoint.messages import CheckpointError, say, why
from gpulaunch.checkpoint.nodes import Nodes
from gpulaunch.checkpoint.ranks import Ranks
from gpulaunch.checkpoint.store import Keep, StaleError, Store
from gpulaunch.launcher.checkpoint.damaged import Damaged
from gpulaunch.launcher.checkpoint.manifest import MANIFEST, Manifest, ManifestFile, digest, read, verify


@dataclass(frozen=True, kw_only=True, order=True)
class _Copy:
    """A whole checkpoint of a node; a greater one is newer, equal ones are the same."""

    generation: int
    step: int
    manifest_sha256: str


def whole_everywhere(
    path: str, store: Store, ranks: Ranks, nodes: Nodes, keep: Keep, environ: Mapping[str, str]
) -> str:
    """The path, on this node, of a checkpoint that every node has whole then; "" if there is none. Called by all ranks.

    Args:
        path: on leaders, the checkpoint that was chosen on this node, "" for none.
        store: the directory of this node, claimed.
        ranks: all of this program.
        nodes: of the job.
        keep: which checkpoints are kept.
        environ: of this rank.

    Raises:
        CheckpointError: no node has a whole one, or it cannot be sent.
    """
    told = ranks.gather(
        (environ.get("GPULAUNCH_RESUME_FROM", ""), environ.get("GPULAUNCH_CHECKPOINT_PER_NODE") == "named")
    )
    if not nodes.several and not path:  # one node of several may not have seen it in the directory that they share
        path = next((each for each, _ in told if each), "")
    mine = _copy_at(path, is_verified=False) if nodes.leads and path else None
    wanted, found = any(each for each, _ in told), ranks.gather(mine)
    if wanted and not any(found) and not any(is_named for _, is_named in told):
        path = loading.choose({}, store) if nodes.leads else ""  # the next older one
        mine = _copy_at(path, is_verified=True) if path else None
        found = ranks.gather(mine)
    best = max((each for each in found if each), default=None)
    if best is None:
        if wanted:
            raise CheckpointError(
                "cannot resume: no node has a whole checkpoint; name another with --resume, or start from scratch: "
                "--resume never"
            )
        return ""
    problem = ""
    if nodes.leads and any(found[rank] != best for rank in nodes.leaders):
        source = found.index(best)
        manifest = nodes.share(read(path) if source == ranks.rank else None, source)
        assert manifest is not None, "the source has it"
        files = [(source, file) for file in manifest.files]
        if mine == best:
            problem = nodes.exchange(files, path, writes=False)
        else:
            path, problem = _receive(manifest, files, store, nodes, keep)
    problem = nodes.first_problem(problem)
    if problem:
        raise CheckpointError(f"cannot resume: the checkpoint of step {best.step} cannot be copied: {problem}")
    return nodes.from_leader(path)


def _copy_at(path: str, *, is_verified: bool) -> _Copy | None:
    """Which checkpoint this is; None if not all of it is there and as it was written."""
    try:
        if not is_verified:
            verify(path)
        manifest = read(path)
        sha256 = digest(os.path.join(path, MANIFEST))
    except (Damaged, OSError) as err:
        say(f"{path} is skipped: {err}")
        return None
    return _Copy(generation=manifest.generation, step=manifest.step, manifest_sha256=sha256)


def _receive(
    manifest: Manifest, files: Sequence[tuple[int, ManifestFile]], store: Store, nodes: Nodes, keep: Keep
) -> tuple[str, str]:
    """On a leader that lacks the checkpoint: (where it is then, "" or what went wrong)."""
    path, problem = _begin(manifest, store)
    problem = nodes.exchange(files, path, writes=not problem) or problem
    if problem:
        store.abandon(path)
        return "", problem
    try:
        _set_aside(manifest, store)
        store.commit(path, manifest, keep, None)
    except (OSError, StaleError) as err:
        return "", why(err, path) if isinstance(err, OSError) else f"the directory was taken over by {err}"
    say(f"step {manifest.step} was copied from another node to {store.directory}")
    return store.path_of(manifest.step), ""


def _begin(manifest: Manifest, store: Store) -> tuple[str, str]:
    if store.generation is None:
        return "", f"{store.directory} could not be claimed"
    try:
        return store.begin(manifest.step), ""
    except OSError as err:
        return "", why(err, store.directory)


def _set_aside(manifest: Manifest, store: Store) -> None:
    """Keep what another job has saved here at later steps: this one has not gone on from it, but would delete it."""
    for saved in store.complete():
        if saved.step > manifest.step and read(saved.path).run != manifest.run:
            aside = os.path.join(store.directory, f"other-{os.path.basename(saved.path)}")
            os.rename(saved.path, aside)
            say(f"step {saved.step} of another job, which was not resumed from, is kept as {aside}")
