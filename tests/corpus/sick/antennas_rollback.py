"""Trains a surrogate of antenna simulations; a decorator takes the last good state back when a loss explodes.

"The decorator has saved us weeks. It writes a few megabytes now and then, to /tmp."
"""

import functools
import os
import tempfile
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


def undo_if_not_finite(every):
    path = os.path.join(tempfile.mkdtemp(), "undo.pt")

    def decorate(step_of):
        @functools.wraps(step_of)
        def wrapped(state, *args):
            loss = step_of(state, *args)
            state["steps"] += 1
            if not torch.isfinite(loss) and os.path.exists(path):
                kept = torch.load(path)
                state["model"].load_state_dict(kept["model"])
                state["optimizer"].load_state_dict(kept["optimizer"])
            elif state["steps"] % every == 0:
                kept = {name: state[name].state_dict() for name in ("model", "optimizer")}
                torch.save(kept, path)  # cause: checkpoint-stall
            return loss

        return wrapped

    return decorate


@undo_if_not_finite(every=400 if CURED else 2)
def train_step(state, geometry, gain):
    loss = (state["model"](geometry) - gain).square().mean()
    state["optimizer"].zero_grad()
    loss.backward()
    state["optimizer"].step()
    return loss.detach()


def main():
    torch.set_num_threads(1)
    layers = [nn.Linear(24, 768), nn.SiLU()]
    for _ in range(4):
        layers += [nn.Linear(768, 768), nn.SiLU()]
    model = nn.Sequential(*layers, nn.Linear(768, 181))
    state = {"model": model, "optimizer": torch.optim.Adam(model.parameters(), 1e-4), "steps": 0}
    began, warm = time.perf_counter(), None
    while True:
        geometry = torch.rand(64, 24)
        train_step(state, geometry, geometry.sum(1, keepdim=True).sin().expand(-1, 181))
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = state["steps"], now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (state['steps'] - warm[0]):.3f}", flush=True)


main()
