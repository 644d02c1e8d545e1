"""What torch does with tensors that are moved, converted and asked for their values; results go to stdout as JSON.

Not a test module: test_copies.py runs it with and without taps, and the results must be the same, exceptions included.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

X = torch.arange(6.0).reshape(2, 3)
CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function


class Moves(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = inputs.to(torch.float64)
        if bool(outputs.sum() > -1e9):
            outputs = outputs.cpu().to("cpu")
        return outputs.to(inputs.dtype)


class Converts(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.to(torch.float64).cpu().to("cpu").copy_(inputs)


class Asks(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + inputs.sum().item()


# --- what traces and transforms -------------------------------------------------------------------------------------


@case
def scripted() -> Any:
    @torch.jit.script
    def values(inputs: torch.Tensor) -> float:
        return float(inputs.sum().item()) + float(inputs.nonzero().size(0)) + float(torch.nonzero(inputs).size(0))

    return values(X), torch.jit.script(Moves())(X).tolist()


@case
def scripted_with_autocast() -> Any:
    @torch.jit.script
    def half(inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.mm(inputs, inputs.t())

    return half(X).tolist()


@case
def traced() -> Any:
    return torch.jit.trace(Moves(), X)(X).tolist()


@case
def symbolically_traced() -> Any:
    return torch.fx.symbolic_trace(Converts()).code


@case
def symbolically_traced_into_a_tensor() -> Any:
    class Fills(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.zeros(2, 3))

        def forward(self, inputs: torch.Tensor) -> Any:
            return self.kept.copy_(inputs)

    traced = torch.fx.symbolic_trace(Fills())
    return traced.code, traced(X).tolist()


@case
def what_is_known_of_methods() -> Any:
    names = ("to", "cuda", "cpu", "copy_", "pin_memory", "item", "tolist", "numpy", "nonzero", "__bool__", "__index__")
    methods = [getattr(torch.Tensor, name) for name in names]
    return [
        (torch.overrides.is_tensor_method_or_property(method), torch.overrides.resolve_name(method))
        for method in methods
    ]


@case
def traced_by_dispatch() -> Any:
    return make_fx(lambda inputs: inputs.to("meta"))(X).code, make_fx(Converts())(X).code


@case
def exported() -> Any:
    graphs = (torch.export.export(module, (X,), strict=False).graph for module in (Converts(), Asks()))
    return [str(graph) for graph in graphs]


@case
def exported_strictly() -> Any:
    return str(torch.export.export(Converts(), (X,), strict=True).graph)


@case
def mapped() -> Any:
    return torch.func.vmap(lambda row: row.to(torch.float64).to("meta").sum())(X).shape


@case
def mapped_values() -> Any:
    return torch.func.vmap(lambda row: row.sum().item())(X)


@case
def differentiated() -> Any:
    gradient = torch.func.grad(lambda inputs: inputs.to(torch.float64).sum())(X)
    return gradient.tolist(), torch.func.jvp(lambda inputs: inputs.to(torch.float64) * 2, (X,), (X,))[1].tolist()


@case
def functionalized() -> Any:
    return torch.func.functionalize(lambda inputs: inputs.copy_(inputs + 1))(X.clone()).tolist()


@case
def fake() -> Any:
    with FakeTensorMode():
        inputs = torch.ones(2)
        return str(inputs.cpu().device), type(inputs.to("meta")).__name__, type(inputs.to(torch.float64)).__name__


@case
def fake_values() -> Any:
    with FakeTensorMode():
        return torch.ones(()).item()


# --- who watches calls ----------------------------------------------------------------------------------------------


@case
def functions_that_a_mode_sees() -> Any:
    class Watching(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(
                (func.__name__, func in (torch.Tensor.to, torch.Tensor.item, torch.Tensor.copy_, torch.nonzero))
            )
            return func(*args, **(kwargs or {}))

    seen: list[tuple[str, bool]] = []
    with Watching():
        moved = X.to("meta")
        X.to(torch.float64).copy_(X)
        torch.nonzero(X)
        moved.copy_(X)
        X.sum().item()
        bool(X.sum())
    return seen


@case
def operations_that_a_mode_sees() -> Any:
    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    with Watching():
        X.to("meta").copy_(X)
        X.sum().item()
        X.to(torch.float64).cpu()
        nn.Linear(2, 2).to("meta")
    return seen


@case
def default_devices() -> Any:
    with torch.device("meta"):
        layer = nn.Linear(2, 2)
        made = torch.zeros(2)
    return str(made.device), str(layer.to_empty(device="cpu").weight.device)


# --- other kinds of tensors -----------------------------------------------------------------------------------------


@case
def sparse() -> Any:
    there = X.to_sparse().to("meta")
    return X.to_sparse().to(torch.float64).to("cpu").to_dense().tolist(), str(there.device), there.layout


@case
def nested() -> Any:
    rows = torch.nested.nested_tensor([X, X], layout=torch.jagged)
    return rows.to(torch.float64).to("cpu").size(0), str(rows.to("meta").device)


@case
def quantized() -> Any:
    return torch.quantize_per_tensor(X, 0.1, 0, torch.quint8).to("cpu").dequantize().tolist()


@case
def masked() -> Any:
    return torch.masked.masked_tensor(X, X > 2).to(torch.float64)


@case
def lazy() -> Any:
    outputs = nn.LazyConv2d(2, 3).to(torch.float64)(torch.ones(1, 3, 8, 8, dtype=torch.float64))
    return str(nn.LazyLinear(2).to("meta").weight.device), outputs.shape


@case
def parameters() -> Any:
    parameter = nn.Parameter(torch.ones(3))
    parameter.to("meta")
    return float(parameter.sum()), parameter.data.copy_(torch.zeros(3)).tolist(), type(parameter.to(torch.float64))


@case
def packed() -> Any:
    return nn.utils.rnn.pack_sequence([X[0], X[1]]).to("cpu").data.tolist()


# --- values and arguments -------------------------------------------------------------------------------------------


@case
def printed() -> Any:
    return f"{X.sum():.2f} {X.sum()} {X}"


@case
def as_numbers() -> Any:
    two = torch.tensor(2)
    return [10, 11, 12][two], list(range(two)), torch.tensor(3.0) in X, 2.0 in X, round(X.sum().item(), 2)


@case
def as_arrays() -> Any:
    import numpy

    return X.numpy().tolist(), numpy.asarray(X).tolist(), X.clone().requires_grad_().numpy(force=True).tolist()


@case
def as_functions() -> Any:
    return list(map(torch.Tensor.item, torch.ones(3))), torch.utils._pytree.tree_map(torch.Tensor.tolist, [X])


@case
def keywords() -> Any:
    there = X.to(device="meta", dtype=torch.float64, copy=True, memory_format=torch.contiguous_format)
    places = torch.nonzero(X, out=torch.empty(0, dtype=torch.long))
    return str(there.dtype), X.nonzero(as_tuple=True)[0].tolist(), torch.nonzero(input=X).tolist(), places.tolist()


@case
def copied_and_saved() -> Any:
    file = io.BytesIO()
    torch.save(nn.Linear(2, 2).state_dict(), file)
    file.seek(0)
    return list(torch.load(file)), copy.deepcopy(X).tolist(), pickle.loads(pickle.dumps(X)).tolist()


def fails(name: str, function: Callable[[], Any]) -> None:
    CASES[name] = function


fails("no_numpy_of_what_needs_a_gradient", lambda: X.clone().requires_grad_().numpy())
fails("no_truth_of_many", lambda: bool(X))
fails("no_number_of_many", lambda: int(X))
fails("no_item_of_many", lambda: X.item())
fails("no_copy_without_a_source", lambda: torch.empty(2).copy_())
fails("no_copy_of_another_size", lambda: torch.empty(2).copy_(X))
fails("no_pinning_here", lambda: X.pin_memory())
fails("no_cuda_here", lambda: X.cuda())
fails("no_values_of_meta", lambda: X.to("meta").sum().item())


# --- training -------------------------------------------------------------------------------------------------------


@case
def optimizers() -> Any:
    results = []
    for kind in ("Adam", "AdamW", "RMSprop", "NAdam", "RAdam", "Adagrad", "LBFGS"):
        for how in ({}, {"foreach": True}, {"foreach": False}):
            if kind == "LBFGS" and how:
                continue
            parameter = nn.Parameter(torch.ones(3))
            optimizer = getattr(torch.optim, kind)([parameter], lr=0.1, **how)
            for _ in range(3):

                def closure(optimizer: Any = optimizer, parameter: Any = parameter) -> torch.Tensor:
                    optimizer.zero_grad()
                    loss: torch.Tensor = parameter.square().sum()
                    loss.backward()
                    return loss

                optimizer.step(closure)
            results.append(parameter.tolist())
    return results


@case
def scaled_and_clipped() -> Any:
    scaler, parameter = torch.amp.GradScaler("cpu"), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler.scale(parameter.sum()).backward()
    norm = float(nn.utils.clip_grad_norm_([parameter], 1.0))
    scaler.step(optimizer)
    scaler.update()
    return norm, parameter.tolist(), scaler.get_scale()


@case
def checkpointed() -> Any:
    inputs = torch.ones(3, requires_grad=True)
    outputs = torch.utils.checkpoint.checkpoint(
        lambda value: value.to(torch.float64).sum() * value.sum().item(), inputs, use_reentrant=False
    )
    outputs.backward()
    assert inputs.grad is not None
    return inputs.grad.tolist()


@case
def gradient_hooks() -> Any:
    inputs = torch.ones(2, requires_grad=True)
    inputs.register_hook(torch.Tensor.cpu)
    inputs.sum().backward()
    assert inputs.grad is not None
    return inputs.grad.tolist()


def main() -> None:
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name, function in CASES.items():
        torch.manual_seed(0)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                result = repr(function())
            except Exception as error:
                result = f"{type(error).__name__}: {error}"
        results[name] = [result, sorted({str(warning.message) for warning in warned})]
    print(json.dumps(results))


main()
