"""Which checkpoint an attempt goes on from when the search for one brings trouble; the search itself is played."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from gpulaunch.launcher.agent import recovery
from gpulaunch.launcher.agent.recovery import Recovery
from gpulaunch.launcher.checkpoint.find import Checkpoint, Search
from gpulaunch.launcher.checkpoint.finder import SearchRequest

GONE = Search(error="the search for a checkpoint timed out after 720 s")
ONE = Checkpoint(path="/c/last.pt", format="torch", step=7, saved_s=1.0, size_bytes=9, key="last.pt")


class Played:
    """A finder whose answers are given; the memory of cards, which are none, answers at once."""

    answers: list[Search]
    asked: list[SearchRequest]

    def __init__(self, loop: object) -> None:
        self.pid = None

    def start(self, ask: Any, done: Any, *others: Any) -> None:
        if isinstance(ask, SearchRequest):
            Played.asked.append(ask)
            done(Played.answers.pop(0))
        else:
            others[-1]("")

    def measure(self, gpus: object, bound_s: float, done: Callable[[dict[str, int]], None]) -> None:
        done({})


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[str], Recovery]]:
    """Prepare attempts with these answers of searches; what came of each: offers, or why it was refused."""
    monkeypatch.setattr(recovery, "Finder", Played)
    monkeypatch.setattr(recovery.memory, "MemoryWait", Played)

    def play(
        *attempts: list[Search],
        nnodes: int = 1,
        where: str = "/",
        named: tuple[str, ...] = (),
        replicate: bool = False,
    ) -> tuple[list[str], Recovery]:
        spec = SimpleNamespace(
            max_restarts=3,
            restart_rate=None,
            restart_backoff_s=0.0,
            no_progress_limit=3,
            resume="auto",
            resume_arg=None,
            resume_search_s=600.0,
            checkpoint_dirs=named,
            checkpoint_pattern=None,
            nnodes=nnodes,
            nproc=1,
            replicates=replicate and nnodes > 1,
        )
        context: Any = SimpleNamespace(
            spec=spec,
            loop=SimpleNamespace(now=lambda: 1.0),
            checkpoint_dirs=(where,),
            segments=None,
            rundir=SimpleNamespace(path="/run", event=lambda _what, **_fields: None),
        )
        made = Recovery(context, gpus=(), say=lambda _: None)
        outcomes: list[str] = []
        Played.asked = []
        for attempt, answers in enumerate(attempts):
            Played.answers = list(answers)
            made.prepare(
                attempt,
                lambda offers: outcomes.append(f"offers {tuple(offer.key for offer in offers)}"),
                outcomes.append,
            )
            if outcomes[-1].startswith("offers ('"):
                made.choose(outcomes[-1].split("'")[1], node_rank=nnodes - 1, nnodes=nnodes)
            assert not Played.answers
            made.began()
        return outcomes, made

    return play


def test_storage_that_does_not_answer_is_never_a_beginning_from_nothing(prepare: Any) -> None:
    outcomes, _ = prepare([Search()], [GONE, GONE, GONE])

    assert outcomes[0] == "offers ()"
    assert outcomes[1].endswith("to start from scratch: --resume never")


def test_it_is_searched_again_and_found(prepare: Any) -> None:
    assert prepare([Search()], [GONE, Search(found=(ONE,))])[0][1] == "offers ('last.pt',)"


def test_the_first_start_is_refused_too(prepare: Any) -> None:
    assert prepare([GONE])[0][0].endswith("to start from scratch: --resume never")


def test_a_first_start_without_a_directory_needs_no_search(prepare: Any) -> None:
    """No child could be forked, say; a directory that was named may be a mount that is late."""
    assert prepare([GONE], where="/nowhere/checkpoints")[0] == ["offers ()"]
    refused = prepare([GONE], where="/nowhere/c", named=("/nowhere/c",))[0]
    assert refused[0].endswith("to start from scratch: --resume never")


def test_what_was_gone_on_from_before_is_better_than_nothing(prepare: Any) -> None:
    assert prepare([Search(found=(ONE,))], [GONE])[0] == ["offers ('last.pt',)"] * 2


def test_a_search_that_ended_and_found_nothing_is_a_beginning(prepare: Any) -> None:
    assert prepare([Search()], [Search()])[0] == ["offers ()"] * 2


def test_nodes_offer_what_tells_checkpoints_apart(prepare: Any) -> None:
    found = replace(ONE, identity="step 7")

    outcomes, made = prepare([Search(found=(found,))], nnodes=2)

    assert outcomes == ["offers ('step 7:last.pt',)"]
    assert made.resumed == found


def test_a_node_without_the_checkpoint_is_told_so_and_its_ranks_receive_it(prepare: Any) -> None:
    _, made = prepare([Search()], nnodes=2, replicate=True)

    assert made.choose("step 7 manifest 0123:step-000000000007", nnodes=2).path == ""
    assert made.resumed is None


def test_with_replicate_what_the_program_has_saved_itself_is_left_alone(prepare: Any) -> None:
    own = replace(ONE, format="gpulaunch", key="step-000000000005", generation=2, step=5)

    assert prepare([Search(found=(ONE,))], nnodes=2, replicate=True)[0] == ["offers ()"]
    assert prepare([Search(found=(ONE, own))], nnodes=2, replicate=True)[0] == [f"offers ('{own.key}',)"]
    assert prepare([Search(found=(ONE,))], nnodes=1, replicate=True)[0] == [f"offers ('{ONE.key}',)"], "nothing to copy"


def test_several_nodes_verify_the_agreed_one_only(prepare: Any) -> None:
    """The offers are looked at by their structure; then each node reads its share of the one, behind its ranks."""
    older = replace(ONE, path="/c/older.pt", key="older.pt", verified=False)

    prepare([Search(found=(replace(ONE, verified=False), older)), Search()], nnodes=3)
    search, verify = Played.asked

    assert (search.content_s, search.named, search.is_behind) == (0, None, False)
    assert (verify.named, verify.share, verify.is_behind) == ("/c/last.pt", (2, 3), True)
    assert verify.content_s > 3600
