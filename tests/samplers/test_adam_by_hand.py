"""Which optimizers of a program's own do what torch's AdamW does."""

from __future__ import annotations

import ast

import pytest

from gpulaunch.profiler.samplers.adam_by_hand import lines_of_adam

ADAM = """
class AdamW(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad.data
                if grad.is_sparse:
                    raise RuntimeError("not sparse")
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
                beta1, beta2 = group["betas"]
                state["step"] += 1
                exp_avg.mul_(beta1).add_(grad, alpha=1.0 - beta1)
                exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
                denom = exp_avg_sq.sqrt().add_(group["eps"])
                size = group["lr"] * math.sqrt(1.0 - beta2 ** state["step"]) / (1.0 - beta1 ** state["step"])
                p.addcdiv_(exp_avg, denom, value=-size)
                if group["weight_decay"] > 0.0:
                    p.add_(p, alpha=-group["lr"] * group["weight_decay"])
        return loss
"""


def test_adam_tensor_by_tensor_is_told_at_its_loop() -> None:
    assert set(lines_of_adam(ast.parse(ADAM)).values()) == {7}
    decayed = ADAM.replace("grad = p.grad.data", "grad = p.grad\n                grad = grad.add(p, alpha=decay)")
    assert set(lines_of_adam(ast.parse(decayed)).values()) == {7}


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ("p.addcdiv_(exp_avg, denom", "trust = p.norm() / exp_avg.norm()\n                p.addcdiv_(exp_avg, denom"),
        ("p.addcdiv_(exp_avg, denom", "p.add_(grad, alpha=-size)\n                p.addcdiv_(exp_avg, denom"),
        ("p.addcdiv_(exp_avg, denom, value=-size)", "p.add_(exp_avg.sign(), alpha=-size)"),
        ("p.addcdiv_(exp_avg, denom, value=-size)", "p.add_(exp_avg, alpha=-size)"),
        ("addcmul_(grad, grad,", "addcmul_(hessian, hessian,"),
        ("grad = p.grad.data", "grad = p.grad - self.state[p]['exp_avg']"),
        ("grad = p.grad.data", "grad = project(p.grad)"),
        (
            "p.addcdiv_(exp_avg, denom",
            "exp_avg = exp_avg * (exp_avg * grad > beta1)\n                p.addcdiv_(exp_avg, d",
        ),
        ("p.addcdiv_(exp_avg, denom", "ahead = exp_avg.add(grad)\n                p.addcdiv_(ahead, denom"),
        ("exp_avg_sq.mul_(beta2).addcmul_", "exp_avg_sq.addcmul_"),
        ("exp_avg_sq.sqrt()", "exp_avg_sq.pow(0.125)"),
        (
            'size = group["lr"] * math.sqrt(1.0 - beta2 ** state["step"]) / (1.0 - beta1 ** state["step"])',
            "size = 1e-3",
        ),
        ("exp_avg.mul_(beta1)", "exp_avg *= mask\n                exp_avg.mul_(beta1)"),
        ("p.addcdiv_(exp_avg, denom, value=-size)", "p.addcdiv_(tensor1=exp_avg, tensor2=denom, value=-size)"),
        ("torch.optim.Optimizer", "Scheduler"),
        ('group["params"]', "self.weights"),
    ],
    ids=[
        *("LAMB", "RAdam", "a sign", "momentum alone", "a Hessian", "AdaBelief", "a projection", "a mask"),
        *("NAdam", "Adagrad", "another power", "no correction", "a mask in place", "arguments by name"),
        *("no optimizer", "other parameters"),
    ],
)
def test_what_does_more_than_adam_is_not_told(was: str, now: str) -> None:
    assert was in ADAM
    assert lines_of_adam(ast.parse(ADAM.replace(was, now))) == {}
