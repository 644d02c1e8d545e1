from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpulaunch.launcher.logs.fold import MAX_WAITING_BYTES, MAX_WAITING_LINES, WINDOW_S, Fold, FoldWindow


def test_the_same_line_of_all_ranks_is_one_at_once() -> None:
    window = FoldWindow(num_ranks=3)
    for rank in (2, 0):
        window.add(0.0, rank, b"hello")
    assert window.ready(0.0) == []

    window.add(0.01, 1, b"hello")
    assert window.ready(0.01) == [Fold(b"hello", (0, 1, 2))]
    assert window.deadline_s is None


def test_a_line_waits_for_others_only_so_long() -> None:
    window = FoldWindow(num_ranks=8)
    window.add(5.0, 3, b"only me")
    window.add(5.04, 4, b"me too")

    assert window.deadline_s == 5.0 + WINDOW_S
    assert window.ready(5.0 + WINDOW_S) == [Fold(b"only me", (3,))]
    assert window.ready(6.0) == [Fold(b"me too", (4,))]


def test_a_rank_that_repeats_itself_is_heard_each_time() -> None:
    window = FoldWindow(num_ranks=2)
    for rank in (0, 0, 1, 1, 1):
        window.add(0.0, rank, b"x")

    assert window.flush() == [Fold(b"x", (0, 1)), Fold(b"x", (0, 1)), Fold(b"x", (1,))]


def test_lines_in_another_order_are_not_folded_across() -> None:
    window = FoldWindow(num_ranks=2)
    for rank, line in ((0, b"a"), (0, b"b"), (1, b"b"), (1, b"a")):
        window.add(0.0, rank, line)

    assert window.flush() == [Fold(b"a", (0,)), Fold(b"b", (0, 1)), Fold(b"a", (1,))]


def test_what_waits_is_bounded() -> None:
    window = FoldWindow(num_ranks=2)
    waiting = 0
    for number in range(3 * MAX_WAITING_LINES):
        window.add(0.0, 0, b"%d" % number)
        waiting += 1 - len(window.ready(0.0))
        assert 0 < waiting <= MAX_WAITING_LINES
    assert len(window.flush()) == waiting
    long, waited = b"x" * (MAX_WAITING_BYTES // 3), [0]
    for _ in range(10):
        window.add(0.0, 0, long)
        waited.append(waited[-1] + 1 - len(window.ready(0.0)))
    assert len(long) < max(waited) * len(long) <= MAX_WAITING_BYTES
    assert len(window.flush()) == waited[-1]
    assert (window.deadline_s, window.flush()) == (None, [])
    window.add(0.0, 1, long)
    assert window.flush() == [Fold(long, (1,))], "of what has left nothing is known"


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([b"a", b"b", b"c", b""]), st.sampled_from([0.0, 0.01, 0.05, 0.2]))
    ),
    st.integers(0, 4),
)
def test_unfolding_gives_each_rank_its_own_lines(said: list[tuple[int, bytes, float]], num_ranks: int) -> None:
    window = FoldWindow(num_ranks=num_ranks)
    folds: list[Fold] = []
    now_s = 0.0
    for rank, line, pause_s in said:
        now_s += pause_s
        window.add(now_s, rank, line)
        folds += window.ready(now_s)
        assert window.deadline_s is None or window.deadline_s > now_s
    folds += window.flush()

    for rank in range(4):
        assert [line for who, line, _ in said if who == rank] == [fold.line for fold in folds if rank in fold.ranks]
    assert all(len(set(fold.ranks)) == len(fold.ranks) for fold in folds)
