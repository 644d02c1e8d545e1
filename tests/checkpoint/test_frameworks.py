"""What frameworks make of torch's files: each layout whole, with a part missing, cut off, and with a flipped bit.

The layouts are those that the projects' own sources write; which file of which commit is said at each.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulaunch.launcher.checkpoint.damaged import Damaged
from gpulaunch.launcher.checkpoint.find import examine, find

pytestmark = pytest.mark.torch

Put = Callable[..., Path]


def why_not(path: Path) -> str:
    """Why this is no complete checkpoint; the search must pass over it for the same reason."""
    with pytest.raises(Damaged) as refused:
        examine(str(path))
    search = find([str(path.parent)], limit=99)
    assert str(path) not in [one.path for one in search.found]
    assert (str(path), str(refused.value)) in [(one.path, one.why) for one in search.skipped]
    return str(refused.value)


def flip(path: Path) -> None:
    """Flip a bit in the member data.pkl, which begins shortly after its name."""
    data = bytearray(path.read_bytes())
    data[data.index(b"\x80\x02") + 40] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


# --- Hugging Face Trainer -----------------------------------------------------------------------------------------
# transformers, src/transformers/trainer.py at 000945a: _save_checkpoint, _save_optimizer_and_scheduler,
# _save_rng_state: model, training_args.bin, optimizer.pt, scheduler.pt, rng_state_<rank>.pth, trainer_state.json.


def trainer(put: Put, safetensors: Callable[..., bytes], place: str = "out/checkpoint-500", step: int = 500) -> Path:
    path = put("new.pt", *(f"{place}/{name}" for name in ("optimizer.pt", "scheduler.pt"))).parent
    put("new.pt", *(f"{place}/rng_state_{rank}.pth" for rank in range(2)))
    put("training_args.bin", f"{place}/training_args.bin")
    (path / "model.safetensors").write_bytes(safetensors(weight=[8, 32]))
    (path / "config.json").write_text("{}")
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step, "epoch": 1.0}))
    return path


def test_a_trainers_checkpoint(put: Put, safetensors: Callable[..., bytes]) -> None:
    path = trainer(put, safetensors)

    (found,) = find([str(path.parent)]).found

    assert (found.path, found.format, found.step, found.key) == (str(path), "trainer", 500, "checkpoint-500")


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (lambda path: (path / "trainer_state.json").unlink(), "trainer_state.json is missing: the save was not finish"),
        (lambda path: (path / "trainer_state.json").write_text(""), "trainer_state.json is empty"),
        (lambda path: (path / "trainer_state.json").write_text('{"global'), "trainer_state.json is not JSON"),
        (lambda path: (path / "trainer_state.json").write_text('{"global_step": 400}'), "has global_step 400, and the"),
        (lambda path: (path / "optimizer.pt").unlink(), "optimizer.pt is missing"),
        (lambda path: cut(path / "optimizer.pt"), "optimizer.pt: it has no end record"),
        (lambda path: flip(path / "scheduler.pt"), "scheduler.pt: member new/data.pkl has CRC"),
        (lambda path: (path / "rng_state_0.pth").unlink(), "rng_state_0.pth is missing"),
        (lambda path: flip(path / "rng_state_1.pth"), "rng_state_1.pth: member"),
        (lambda path: cut(path / "model.safetensors"), "model.safetensors has 1"),
        (lambda path: (path / "model.safetensors").unlink(), "it has no model"),
        (
            lambda path: (path / "model.safetensors").rename(path / "model-00001-of-00002.safetensors"),
            "model.safetensors.index.json is missing",
        ),
    ],
)
def test_a_trainers_checkpoint_with_a_part_missing_or_damaged(
    put: Put, safetensors: Callable[..., bytes], harm: Callable[[Path], object], why: str
) -> None:
    older = trainer(put, safetensors, "out/checkpoint-400", 400)
    path = trainer(put, safetensors)
    harm(path)

    assert why in why_not(path)
    assert [one.path for one in find([str(path.parent)]).found] == [str(older)]


def test_a_run_that_saves_only_the_model_has_checkpoints_without_optimizer(
    put: Put, safetensors: Callable[..., bytes]
) -> None:
    path = trainer(put, safetensors)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"):
        (path / name).unlink()
    assert why_not(path) == "optimizer.pt is missing"  # its training_args.bin says save_only_model=False

    put("training_args_only_model.bin", "out/checkpoint-500/training_args.bin")
    assert examine(str(path)).step == 500


def test_a_trainers_checkpoint_saved_by_fsdp_or_deepspeed(put: Put, safetensors: Callable[..., bytes]) -> None:
    """accelerate 16cb6eb, utils/fsdp_utils.py: pytorch_model_fsdp_0/ and optimizer_0/; DeepSpeed: global_step500/."""
    path = trainer(put, safetensors)
    (path / "optimizer.pt").unlink()
    put("dcp_small", "out/checkpoint-500/optimizer_0", "out/checkpoint-500/pytorch_model_fsdp_0")
    assert examine(str(path)).format == "trainer"
    cut(path / "optimizer_0/__0_0.distcp")
    assert "optimizer_0/__0_0.distcp has" in why_not(path)

    path = trainer(put, safetensors, "other/checkpoint-500")
    (path / "optimizer.pt").unlink()
    deepspeed(put, "other/checkpoint-500", 500)
    assert examine(str(path)).format == "trainer"
    flip(path / "global_step500/mp_rank_00_model_states.pt")
    assert "global_step500/mp_rank_00_model_states.pt: member" in why_not(path)


def test_the_output_directory_of_a_trainer_is_not_its_checkpoint(put: Put, safetensors: Callable[..., bytes]) -> None:
    """Example scripts end with trainer.save_model() and trainer.save_state(): newer than every checkpoint."""
    path = trainer(put, safetensors)
    for name in ("model.safetensors", "trainer_state.json", "training_args.bin"):
        (path.parent / name).write_bytes((path / name).read_bytes())

    assert [one.key for one in find([str(path.parent)], limit=9).found] == ["checkpoint-500", "model.safetensors"]


# --- accelerate ---------------------------------------------------------------------------------------------------
# accelerate 16cb6eb, src/accelerate/checkpointing.py: save_accelerator_state.


def test_a_checkpoint_of_accelerate(put: Put, safetensors: Callable[..., bytes]) -> None:
    names = ("optimizer.bin", "scheduler.bin", "random_states_0.pkl", "random_states_1.pkl")
    path = put("new.pt", *(f"checkpoints/checkpoint_3/{name}" for name in names)).parent
    (path / "model.safetensors").write_bytes(safetensors(weight=[8]))
    found = examine(str(path))
    assert (found.format, found.step) == ("accelerate", 3)

    flip(path / "optimizer.bin")
    assert "optimizer.bin: member" in why_not(path)
    put("new.pt", "checkpoints/checkpoint_3/optimizer.bin")
    (path / "random_states_0.pkl").unlink()
    assert why_not(path) == "random_states_0.pkl is missing"
    (path / "random_states_1.pkl").unlink()
    assert why_not(path) == "random_states_0.pkl is missing: the save was not finished"


# --- Lightning ----------------------------------------------------------------------------------------------------
# Lightning 7f0c343: src/lightning/pytorch/trainer/connectors/checkpoint_connector.py (dump_checkpoint),
# callbacks/model_checkpoint.py (names), strategies/fsdp.py (save_checkpoint: DCP files, then meta.pt),
# strategies/deepspeed.py (save_checkpoint: tag "checkpoint").


def test_checkpoints_of_lightning(put: Put) -> None:
    put("lightning.ckpt", "logs/version_0/checkpoints/last.ckpt", "logs/version_0/checkpoints/epoch=1-step=20.ckpt")
    path = put("lightning.ckpt", "logs/version_0/checkpoints/epoch=0-step=10.ckpt")

    found = find([str(path.parents[3])], limit=9).found

    assert {one.key.rpartition("/")[2]: (one.format, one.step) for one in found} == {
        # The step that Lightning wrote inside, which last.ckpt has as well.
        "last.ckpt": ("lightning", 20),
        "epoch=1-step=20.ckpt": ("lightning", 20),
        "epoch=0-step=10.ckpt": ("lightning", 20),
    }
    cut(path)
    assert "epoch=0-step=10.ckpt: it has no end record" in why_not(path)
    put("lightning.ckpt", "logs/version_0/checkpoints/epoch=0-step=10.ckpt")
    flip(path)
    assert "epoch=0-step=10.ckpt: member lightning/data.pkl has CRC" in why_not(path)


def test_a_sharded_checkpoint_of_lightning(put: Put) -> None:
    path = put("dcp", "checkpoints/epoch=1-step=30.ckpt")
    assert why_not(path) == "meta.pt is missing: the save was not finished"

    put("lightning_meta.pt", "checkpoints/epoch=1-step=30.ckpt/meta.pt")
    found = examine(str(path))
    assert (found.format, found.step) == ("lightning", 20)

    (path / "__0_1.distcp").unlink()
    assert why_not(path) == "__0_1.distcp is missing"


def test_a_checkpoint_of_lightnings_deepspeed_strategy(put: Put) -> None:
    path = deepspeed(put, "checkpoints/epoch=1-step=30.ckpt", 0, tag="checkpoint").parent
    found = examine(str(path))
    assert (found.format, found.step) == ("lightning", 30)

    (path / "latest").unlink()
    assert why_not(path) == "latest is missing: the save was not finished"


# --- DeepSpeed ----------------------------------------------------------------------------------------------------
# DeepSpeed edaa722, deepspeed/runtime/engine.py: _get_ckpt_name, _get_rank_zero_ckpt_name, save_checkpoint.


def deepspeed(put: Put, root: str, step: int, *, tag: str = "", stage: int = 2) -> Path:
    tag = tag or f"global_step{step}"
    zero = [f"zero_pp_rank_{rank}_mp_rank_00" for rank in range(2)]
    for model in zero if stage == 3 else ["mp_rank_00"]:
        put("deepspeed_model.pt", f"{root}/{tag}/{model}_model_states.pt")
    path = put("deepspeed_optim.pt", *(f"{root}/{tag}/bf16_{rank}_optim_states.pt" for rank in zero)).parent
    (path.parent / "latest").write_text(tag)
    return path


@pytest.mark.parametrize("stage", [2, 3])
def test_checkpoints_of_deepspeed(put: Put, stage: int) -> None:
    older = deepspeed(put, "run", 10, stage=stage)
    path = deepspeed(put, "run", 20, stage=stage)

    assert [(one.path, one.format, one.step) for one in find([str(path.parent)], limit=9).found] == [
        (str(path), "deepspeed", 20),
        (str(older), "deepspeed", 10),
    ]
    # The directory that load_checkpoint takes stands for the tag that `latest` names.
    assert examine(str(path.parent)).step == 20

    (path / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    search = find([str(path.parent)])
    assert [one.path for one in search.found] == [str(older)]
    assert why_not(path) == "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt is missing"


def test_a_damaged_part_of_a_deepspeed_checkpoint(put: Put) -> None:
    for harm, why in ((cut, "it has no end record"), (flip, "member deepspeed_optim/data.pkl has CRC")):
        path = deepspeed(put, "run", 20)
        harm(path / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
        assert why in why_not(path)
    (path / "mp_rank_00_model_states.pt").unlink()
    assert why_not(path) == "mp_rank_00_model_states.pt is missing"


def test_a_tag_that_latest_does_not_name_yet_was_not_finished(put: Put) -> None:
    path = deepspeed(put, "run", 20)
    older = deepspeed(put, "run", 10)
    assert (path.parent / "latest").read_text() == "global_step10"

    assert why_not(path) == "latest still names global_step10: the save was not finished"
    assert find([str(path.parent)]).found[0].path == str(older)
    (path.parent / "latest").unlink()  # save_latest=False: every tag stands for itself
    assert find([str(path.parent)]).found[0].path == str(path)


# --- Megatron -----------------------------------------------------------------------------------------------------
# Megatron-LM d98e8a6, megatron/training/checkpointing.py: get_checkpoint_name, save_checkpoint (iter_finalize_fn),
# get_distributed_optimizer_checkpoint_name; megatron/core/dist_checkpointing/core.py: metadata.json.


def megatron(put: Put, step: int) -> Path:
    ranks = [f"load/iter_{step:07d}/mp_rank_{tensor:02d}_{pipe:03d}" for tensor in range(2) for pipe in range(2)]
    path = put("new.pt", *(f"{rank}/{name}.pt" for rank in ranks for name in ("model_optim_rng", "distrib_optim")))
    root = path.parents[2]
    (root / "latest_checkpointed_iteration.txt").write_text(str(step))
    return root / f"iter_{step:07d}"


def test_checkpoints_of_megatron(put: Put) -> None:
    older, path = megatron(put, 50), megatron(put, 100)

    assert [(one.path, one.format, one.step) for one in find([str(path.parent)], limit=9).found] == [
        (str(path), "megatron", 100),
        (str(older), "megatron", 50),
    ]
    assert examine(str(path.parent)).step == 100

    (path.parent / "latest_checkpointed_iteration.txt").write_text("50")
    assert "latest_checkpointed_iteration.txt still names iter_0000050" in why_not(path)
    assert find([str(path.parent)]).found[0].path == str(older)


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (
            lambda path: (path / "mp_rank_01_001/model_optim_rng.pt").unlink(),
            "mp_rank_01_001/model_optim_rng.pt is ",
        ),
        (
            lambda path: (path / "mp_rank_01_000/distrib_optim.pt").unlink(),
            "distrib_optim.pt is missing for some ranks",
        ),
        (lambda path: (path / "mp_rank_00_001").rename(path / "mp_rank_00_002"), "mp_rank_00_001 is missing"),
        (lambda path: flip(path / "mp_rank_00_001/distrib_optim.pt"), "mp_rank_00_001/distrib_optim.pt: member"),
        (lambda path: cut(path / "mp_rank_01_001/model_optim_rng.pt"), "mp_rank_01_001/model_optim_rng.pt: it has no"),
    ],
)
def test_a_damaged_checkpoint_of_megatron(put: Put, harm: Callable[[Path], object], why: str) -> None:
    path = megatron(put, 100)
    harm(path)

    assert why in why_not(path)


def test_a_distributed_checkpoint_and_a_release_of_megatron(put: Put) -> None:
    path = put("dcp", "load/iter_0000100")
    put("new.pt", "load/iter_0000100/common.pt")
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (path.parent / "latest_checkpointed_iteration.txt").write_text("100")
    assert examine(str(path)).format == "megatron"

    flip(path / "common.pt")
    assert "common.pt: member" in why_not(path)

    release = put("new.pt", "released/release/mp_rank_00/model_optim_rng.pt").parents[1]
    (release.parent / "latest_checkpointed_iteration.txt").write_text("release")
    (found,) = find([str(release.parent)]).found
    assert (found.path, found.format, found.step) == (str(release), "megatron", None)
