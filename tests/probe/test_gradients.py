"""Gradients that nothing uses are found in graphs of torch itself (imported here: two seconds), and no others."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gpulaunch.profiler.probe import gradients
from gpulaunch.profiler.probe.gradients import GradientUse
from gpulaunch.profiler.probe.graph import contents_of, graph_below

X = torch.randn(16, 8)


@pytest.fixture(autouse=True)
def _optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """None but those of the test: the probe is not installed here."""
    monkeypatch.setattr(gradients, "optimizers", weakref.WeakSet())
    monkeypatch.setattr(gradients, "stepped", set[int]())


def optimizer(*modules: nn.Module, kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> torch.optim.Optimizer:
    made = kind([each for module in modules for each in module.parameters()], lr=0.1)
    gradients.optimizers.add(made)
    return made


def fact(loss: Callable[[], torch.Tensor], *steppers: torch.optim.Optimizer, rows: int = 2) -> dict[str, Any] | None:
    """What is told after some rows of two passes, between which the optimizers step."""
    use = GradientUse(torch)
    for _ in range(rows):
        use.begin()
        for _ in range(2):
            of = loss()
            use.add(graph_below(torch, (of,)))
            of.backward()
        for each in steppers:
            each.step()
            each.zero_grad()
    return use.fact()


def mlp(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8))


def size(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters())


def test_backward_through_a_teacher_is_in_vain() -> None:
    teacher, student = mlp(32), mlp()
    step = optimizer(student)

    told = fact(lambda: nn.functional.mse_loss(student(X), teacher(X)), step)

    assert told == {
        "elements": size(teacher) + size(student),
        "unused_elements": size(teacher),
        "resting_elements": 0,
        "unused_share": pytest.approx(size(teacher) / (size(teacher) + size(student)), abs=0.001),
        "untouched_elements": 0,
        "cleared_share": 0.0,
        "cleared_at": "",
        "head_rows": 0,
        "loss_rows": 0,
        "loss_ignores": False,
        "head_share": 0.0,
    }
    once = fact(lambda: nn.functional.mse_loss(student(X), teacher(X)), step, rows=1)
    assert once is not None
    assert once["unused_elements"] == 0, "only once it is known that its value does not change"


@pytest.mark.parametrize("guard", ["no_grad", "detached", "requires_grad"])
def test_a_teacher_that_is_left_out_is_no_loss(guard: str) -> None:
    teacher, student = mlp(32), mlp()
    step = optimizer(student)
    if guard == "requires_grad":
        teacher.requires_grad_(False)

    def loss() -> torch.Tensor:
        with torch.set_grad_enabled(guard != "no_grad"):
            soft = teacher(X)
        return nn.functional.mse_loss(student(X), soft.detach() if guard == "detached" else soft)

    told = fact(loss, step)

    assert told is not None
    assert (told["elements"], told["unused_elements"], told["unused_share"]) == (size(student), 0, 0)


def test_a_convolution_computes_with_each_weight_at_all_places_of_a_picture() -> None:
    stem, head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8 * 4, 5)
    pictures, step = torch.randn(2, 3, 16, 16), optimizer(head)

    told = fact(lambda: head(nn.functional.max_pool2d(stem(pictures), 8).flatten(1)).sum(), step)

    of_stem, of_head = 2 * 16 * 16 * (8 * 3 * 3 * 3 + 8), 2 * (8 * 4 * 5 + 5)
    assert told is not None
    assert told["unused_elements"] == size(stem)
    assert told["unused_share"] == pytest.approx(of_stem / (of_stem + of_head), abs=0.001)


def test_half_of_it_is_in_vain_where_the_gradient_must_pass() -> None:
    """A frozen part behind what is trained, as of a perceptual loss; and one in front of it."""
    trained, frozen = mlp(), mlp()
    step = optimizer(trained)

    behind = fact(lambda: frozen(trained(X)).sum(), step)
    before = fact(lambda: trained(frozen(X)).sum(), step)

    assert behind is not None
    assert before is not None
    assert behind["unused_share"] == pytest.approx(0.25, abs=0.01)
    assert before["unused_share"] == pytest.approx(0.5, abs=0.01)


def test_a_gan_updates_all_that_has_gradients_if_not_at_once() -> None:
    maker, critic = mlp(), mlp()
    of_maker, of_critic = optimizer(maker), optimizer(critic, kind=torch.optim.Adam)

    told = fact(lambda: critic(maker(X)).mean(), of_maker, of_critic)

    assert told is not None
    assert told["unused_elements"] == 0


def trained_in_turn(
    maker: nn.Module, critic: nn.Module, judge: Callable[[torch.Tensor], torch.Tensor], *, detached: bool, clears: bool
) -> dict[str, Any]:
    """What is told of a generator and a discriminator that are trained in turn; `clears`: both before each pass."""
    of_maker, of_critic = optimizer(maker), optimizer(critic, kind=torch.optim.Adam)
    use = GradientUse(torch)
    use.begin()

    def trains(loss: torch.Tensor, *steppers: torch.optim.Optimizer) -> None:
        for each in (of_maker, of_critic) if clears else steppers:
            each.zero_grad()
        use.add(graph_below(torch, (loss,)))
        loss.backward()
        for each in steppers:
            each.step()
            gradients.stepped.add(id(each))

    for _ in range(2):
        fake = maker(X)
        both = () if clears else (of_maker,)
        trains(judge(fake.detach() if detached else fake), of_critic, *both)
        trains(judge(maker(X)), of_maker)
    assert use.is_pending
    use.settle()
    told = use.fact()
    assert told is not None
    return told


@pytest.mark.parametrize(
    ("detached", "clears", "share"),
    [(False, True, 0.25), (True, True, 0.0), (False, False, 0.0)],
    ids=["passes through the generator", "detached", "both optimizers step"],
)
def test_a_discriminators_pass_through_the_generator_is_cleared(*, detached: bool, clears: bool, share: float) -> None:
    """Its own pass through the discriminator is needed, though that one's gradients are cleared, too."""
    critic = mlp()
    told = trained_in_turn(mlp(), critic, lambda x: critic(x).mean(), detached=detached, clears=clears)

    assert told["cleared_share"] == pytest.approx(share, abs=0.01)
    assert bool(told["cleared_at"]) is (share > 0)


class Conditional(nn.Module):
    """Looks at a label, too, as a projection discriminator does."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.labels = mlp(), nn.Embedding(100, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.trunk(x) * self.labels(torch.arange(16))).sum(1)


NORMED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "spectral norm": lambda layer: torch.nn.utils.parametrizations.spectral_norm(layer),
    "old spectral norm": lambda layer: torch.nn.utils.spectral_norm(layer),
    "weight norm": lambda layer: torch.nn.utils.parametrizations.weight_norm(layer),
}


def normed(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(norm(nn.Linear(8, 8)), nn.ReLU(), norm(nn.Linear(8, 8)), nn.ReLU(), norm(nn.Linear(8, 1)))


@pytest.mark.parametrize("detached", [True, False])
@pytest.mark.parametrize("kind", [*NORMED, "two inputs", "labels"])
def test_what_prepares_the_weights_of_a_discriminator_is_no_model(kind: str, *, detached: bool) -> None:
    """In the generator's pass it leads to nothing else, and its gradients are cleared, as they should be."""
    critic = Conditional() if kind == "labels" else normed(NORMED[kind]) if kind in NORMED else mlp()

    def judge(x: torch.Tensor) -> torch.Tensor:
        return critic(x).mean() - (critic(X).mean() if kind == "two inputs" else 0.0)

    told = trained_in_turn(mlp(), critic, judge, detached=detached, clears=True)

    assert (told["cleared_share"] > 0.0) is (not detached)


def test_a_pass_whose_optimizers_have_left_out_a_step_is_none_that_is_cleared() -> None:
    """As a GradScaler does: no optimizer has stepped before the gradients were cleared."""
    maker, critic = mlp(), mlp()
    made = optimizer(maker), optimizer(critic)

    def loss() -> torch.Tensor:
        for each in made:
            each.zero_grad()
        return maker(X).sum() + critic(X).sum()

    told = fact(loss)

    assert told is not None
    assert told["cleared_share"] == 0.0


@pytest.mark.parametrize(
    "kind", ["no rate", "some rate", "none at first", "moved by hand", "an optimizer of its own", "Rprop"]
)
def test_a_learning_rate_of_0_updates_nothing(kind: str) -> None:
    frozen, trained = mlp(32), mlp()

    class OfItsOwn(torch.optim.AdamW):
        """One that is not torch's may do anything with its rate."""

    kinds = {"an optimizer of its own": OfItsOwn, "Rprop": torch.optim.Rprop}
    made = kinds.get(kind, torch.optim.AdamW)(
        [{"params": frozen.parameters(), "lr": 1e-9 if kind == "some rate" else 0.0}, {"params": trained.parameters()}]
    )
    gradients.optimizers.add(made)

    def loss() -> torch.Tensor:
        if kind == "moved by hand":
            frozen[0].weight.data.mul_(0.999)
        if kind == "none at first" and made.state:
            made.param_groups[0]["lr"] = 1e-9
        return trained(frozen(X)).sum()

    told = fact(loss, made)

    assert told is not None
    unused = {"no rate": size(frozen), "moved by hand": size(frozen) - frozen[0].weight.numel()}
    assert told["unused_elements"] == told["resting_elements"] == unused.get(kind, 0)
    assert frozen[0].weight in made.state, "the optimizer has stepped"


@pytest.mark.parametrize("by_data", [False, True])
def test_parameters_that_the_program_updates_itself_are_used(by_data: bool) -> None:
    """With `data`, that does not show in their versions."""
    by_hand, trained = mlp(), mlp()
    step = optimizer(trained)

    def loss() -> torch.Tensor:
        with torch.no_grad():
            for each in by_hand.parameters():
                (each.data if by_data else each).mul_(0.999)
        return trained(by_hand(X)).sum()

    told = fact(loss, step)

    assert told is not None
    assert told["unused_elements"] == 0


@pytest.mark.parametrize("kind", ["contiguous", "strided", "empty", "meta", "a subclass", "half", "freed", "a part"])
def test_some_bytes_of_any_parameter(kind: str) -> None:
    class Own(nn.Parameter):
        pass

    freed = torch.arange(100.0)[50:]
    freed.untyped_storage().resize_(0)
    made = {
        "freed": lambda: nn.Parameter(freed),
        "a part": lambda: nn.Parameter(torch.arange(100.0)[98:]),
        "contiguous": lambda: nn.Parameter(torch.arange(100.0)),
        "strided": lambda: nn.Parameter(torch.arange(100.0).view(10, 10).t()),
        "empty": lambda: nn.Parameter(torch.empty(0)),
        "meta": lambda: nn.Parameter(torch.empty(3, device="meta")),
        "a subclass": lambda: Own(torch.ones(3)),
        "half": lambda: nn.Parameter(torch.ones(5, dtype=torch.bfloat16)),
    }
    sizes = {"contiguous": 9 * 4, "half": 5 * 2, "a part": 2 * 4}

    assert len(gradients.some_bytes(made[kind]())) == sizes.get(kind, 0)


@pytest.mark.parametrize(
    ("compute", "told"),
    [
        (lambda x: x.sum(), {"decomposes": False, "tokens": 0, "scores_bytes": 0}),
        (lambda x: torch.linalg.cholesky(x @ x.mT + torch.eye(8)).sum(), {"decomposes": True, "tokens": 0}),
        (lambda x: nn.functional.embedding(torch.arange(8).expand(3, 5, 8)[0], x).sum(), {"tokens": 8}),
        (lambda x: nn.functional.embedding(torch.arange(8), x).sum(), {"tokens": 0}),
        (lambda x: nn.functional.embedding(torch.tensor(1), x).sum(), {"tokens": 0}),
        (lambda x: x.softmax(-1).sum(), {"scores_bytes": 0}),
        (lambda x: x.view(2, 2, 4, 4).softmax(-1).sum() + x[:2].view(2, 2, 4).softmax(-1).sum(), {"scores_bytes": 256}),
    ],
)
def test_what_a_graph_has_is_told(compute: Callable[[torch.Tensor], torch.Tensor], told: dict[str, Any]) -> None:
    contents = contents_of(graph_below(torch, (compute(torch.randn(8, 8, requires_grad=True)),)))

    assert contents | told == contents


def test_a_pass_that_adds_to_gradients_is_told() -> None:
    weights, features = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    told: list[bool] = []
    for _ in range(2):
        loss = (weights * features.detach()).sum()
        told.append(contents_of(graph_below(torch, (loss,)))["accumulates"])
        loss.backward()
    weights.grad = None
    told.append(contents_of(graph_below(torch, ((weights * features).sum(),)))["accumulates"])

    assert told == [False, True, False]


def test_nothing_is_told_where_optimizers_have_other_tensors() -> None:
    """Copies of the parameters in another precision, or shards."""
    model, copies = mlp(), mlp()
    assert fact(lambda: model(X).sum(), optimizer(copies)) is None
    assert fact(lambda: model(X).sum()) is None

    class DTensor(nn.Parameter):
        pass

    step = optimizer(model)
    step.param_groups.append({"params": [DTensor(torch.zeros(3))], "lr": 0.1})
    assert fact(lambda: model(X).sum()) is None


def test_nothing_is_told_of_shards_in_the_graph() -> None:
    """FSDP with the original parameters, and a part of the model that it leaves alone."""

    class FlatParameter(nn.Parameter):
        pass

    model, shard = mlp(), FlatParameter(torch.ones(8))
    assert fact(lambda: (model(X) * shard).sum(), optimizer(model)) is None


def test_an_input_that_wants_its_gradient_is_no_parameter() -> None:
    model = mlp()
    step = optimizer(model)
    attacked = X.clone().requires_grad_()

    told = fact(lambda: model(attacked).sum(), step)

    assert told is not None
    assert (told["elements"], told["unused_elements"]) == (size(model), 0)


def test_rows_of_an_embedding_that_are_not_looked_up_are_counted() -> None:
    songs, tower = nn.Embedding(1000, 8), mlp()
    step = optimizer(songs, tower)
    picked = torch.randint(1000, (5, 10))

    told = fact(lambda: tower(songs(picked)).sum() + songs(picked).sum(), step)

    assert told is not None
    assert told["untouched_elements"] == pytest.approx(0.9 * 8000)
    assert told["elements"] == 8000 + size(tower)


@pytest.mark.parametrize("how", ["sparse", "tied", "small"])
def test_embeddings_whose_gradient_is_sparse_or_needed_are_not(how: str) -> None:
    songs = nn.Embedding(40 if how == "small" else 1000, 8, sparse=how == "sparse")
    step = optimizer(songs)
    picked = torch.randint(40, (5, 10))

    def loss() -> torch.Tensor:
        found = songs(picked)
        return (found @ songs.weight.T if how == "tied" else found).sum()

    told = fact(loss, step)

    assert told is not None
    assert told["untouched_elements"] == 0
