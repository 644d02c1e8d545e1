"""In which phase a stack was taken."""

from __future__ import annotations

import pytest

from gpulaunch.profiler.channel.layout import PHASES, REGION_BITS, Region
from gpulaunch.profiler.samplers.phases import STACK_PHASES, STARTUP, UNSETTLED, phase_of
from gpulaunch.profiler.stack import Frame

TORCH = "/venv/lib/python3.11/site-packages/torch"
USERS = Frame(name="main", file="/home/me/train.py", line=9)


def at(region: Region, edge_ns: int = 1000) -> int:
    """The word LAST_EDGE."""
    return edge_ns << REGION_BITS | region


def stack(*frames: tuple[str, str]) -> tuple[Frame, ...]:
    """Frames below torch, the deepest first, called by the user's program."""
    return (*(Frame(name=name, file=f"{TORCH}/{file}", line=1) for name, file in frames), USERS)


@pytest.mark.parametrize(
    ("region", "phase"),
    [
        (Region.LOADER, "data_wait"),
        (Region.FORWARD, "forward"),
        (Region.BACKWARD, "backward"),
        (Region.STEPPING, "other"),
        (Region.OPTIMIZER, "optimizer"),
        (Region.OTHER, "other"),
        (Region.VALIDATION, "validation"),
    ],
)
def test_where_no_edge_was_passed_the_page_tells(region: Region, phase: str) -> None:
    assert phase_of((USERS,), at(region), at(region)) == phase


@pytest.mark.parametrize("region", Region)
def test_every_region_has_a_phase(region: Region) -> None:
    assert phase_of((USERS,), at(region), at(region)) in STACK_PHASES


def test_every_phase_of_a_step_can_be_one_of_a_stack() -> None:
    assert set(STACK_PHASES) == {STARTUP, *PHASES, UNSETTLED}


def test_before_the_first_edge_it_is_startup_whatever_runs() -> None:
    compiling = stack(("_compile", "_dynamo/convert_frame.py"))

    assert phase_of(compiling, 0, 0) == STARTUP
    assert phase_of((USERS,), 0, at(Region.LOADER)) == STARTUP


@pytest.mark.parametrize(
    ("frames", "phase"),
    [
        (stack(("_save", "serialization.py"), ("save", "serialization.py")), "checkpoint"),
        (stack(("write_data", "distributed/checkpoint/filesystem.py")), "checkpoint"),
        (stack(("step", "_dynamo/symbolic_convert.py"), ("_compile", "_dynamo/convert_frame.py")), "compile"),
        (stack(("codegen", "_inductor/graph.py"), ("compile_fx_inner", "_inductor/compile_fx.py")), "compile"),
        (stack(("all_reduce", "distributed/distributed_c10d.py")), "comm"),
        (stack(("synchronize", "cuda/__init__.py")), "sync"),
        (stack(("Event.synchronize", "cuda/streams.py")), "sync"),
    ],
)
def test_what_happens_within_a_region_is_its_own_phase(frames: tuple[Frame, ...], phase: str) -> None:
    assert phase_of(frames, at(Region.FORWARD), at(Region.FORWARD)) == phase
    assert phase_of(frames, at(Region.FORWARD, 1), at(Region.BACKWARD, 2)) == phase


def test_what_is_loaded_is_no_checkpoint() -> None:
    loading = stack(("_load", "serialization.py"), ("load", "serialization.py"))

    assert phase_of(loading, at(Region.LOADER), at(Region.LOADER)) == "data_wait"


def test_of_two_within_each_other_the_inner_one_counts() -> None:
    """A checkpoint that waits for the other ranks."""
    frames = stack(
        ("barrier", "distributed/distributed_c10d.py"), ("save", "distributed/checkpoint/state_dict_saver.py")
    )

    assert phase_of(frames, at(Region.OTHER), at(Region.OTHER)) == "comm"


@pytest.mark.parametrize(
    "frames",
    [
        stack(("_lazy_init", "cuda/__init__.py")),
        stack(("fn", "_dynamo/eval_frame.py")),  # what is compiled runs
        (Frame(name="synchronize", file="/home/me/train.py", line=2), USERS),
    ],
)
def test_what_only_looks_like_it_is_not(frames: tuple[Frame, ...]) -> None:
    assert phase_of(frames, at(Region.FORWARD), at(Region.FORWARD)) == "forward"


@pytest.mark.parametrize(
    ("frames", "phase"),
    [
        (stack(("_try_get_data", "utils/data/dataloader.py"), ("__next__", "utils/data/dataloader.py")), "data_wait"),
        (stack(("_engine_run_backward", "autograd/graph.py"), ("backward", "_tensor.py")), "backward"),
        (stack(("adamw", "optim/adamw.py"), ("Optimizer.profile_hook_step", "optim/optimizer.py")), "optimizer"),
        (stack(("forward", "nn/modules/linear.py"), ("Module._call_impl", "nn/modules/module.py")), "forward"),
        (stack(("Module.to", "nn/modules/module.py")), UNSETTLED),
        (stack(("LRScheduler.step", "optim/lr_scheduler.py")), UNSETTLED),
        ((USERS,), UNSETTLED),
    ],
)
def test_where_an_edge_was_passed_only_the_stack_can_tell(frames: tuple[Frame, ...], phase: str) -> None:
    """The page says something else, of before and of after."""
    assert phase_of(frames, at(Region.VALIDATION, 1), at(Region.OTHER, 2)) == phase


def test_where_only_some_steps_are_observed_the_others_tell_of_their_batch_and_their_end_only() -> None:
    backward = stack(("_engine_run_backward", "autograd/graph.py"), ("backward", "_tensor.py"))

    for region in (Region.FORWARD, Region.OTHER):
        assert phase_of(backward, at(region), at(region), every_step=False) == "backward"
        assert phase_of((USERS,), at(region), at(region), every_step=False) == UNSETTLED
    for region, phase in ((Region.LOADER, "data_wait"), (Region.BACKWARD, "backward"), (Region.OPTIMIZER, "optimizer")):
        assert phase_of((USERS,), at(region), at(region), every_step=False) == phase


def test_a_page_that_went_away_meanwhile_tells_nothing() -> None:
    assert phase_of((USERS,), at(Region.FORWARD), 0) == UNSETTLED


def test_what_an_optimizer_runs_in_its_closure_is_forward() -> None:
    """So does Lightning's automatic optimization."""
    steps = Frame("SGD.step", "/lib/torch/optim/sgd.py", 116)
    closure = Frame("Closure.closure", "/lib/lightning/pytorch/loops/optimization/automatic.py", 131)
    clears = Frame("Optimizer.zero_grad", "/lib/torch/optim/optimizer.py", 990)
    clips = Frame("Precision._clip_gradients", "/lib/lightning/pytorch/plugins/precision/precision.py", 160)
    within = at(Region.OPTIMIZER)

    assert phase_of((USERS, closure, steps), within, within) == "forward"
    assert phase_of((USERS, Frame("main.<locals>.closure", "train.py", 9), steps), within, within) == "forward"
    for frames in ((clears, closure, steps), (clips, steps), (steps,), (USERS,)):
        assert phase_of(frames, within, within) == "optimizer"
