"""Learns the rhythm of typing from long sessions, in windows, and hands the hidden state on from window to window.

"Within a session it gets slower and needs more memory, then it is quick again."
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"
WINDOW, WINDOWS = 16, 8


class Rhythm(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.inside = nn.Linear(6, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.outside = nn.Linear(width, 6)

    def forward(self, x, hidden):
        states, hidden = self.gru(torch.relu(self.inside(x)), hidden)
        return self.outside(states), hidden


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Rhythm()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    sessions = torch.randn(400, WINDOW * WINDOWS + 1, 6)
    began, warm, step = time.perf_counter(), None, 0
    while True:
        session = sessions[torch.randint(0, 400, (64,))]
        hidden = torch.zeros(1, 64, 96)
        optimizer.zero_grad()
        for window in range(WINDOWS):
            start = window * WINDOW
            x = session[:, start : start + WINDOW]
            y = session[:, start + 1 : start + WINDOW + 1]
            predicted, hidden = model(x, hidden)
            loss = nn.functional.smooth_l1_loss(predicted, y) / WINDOWS
            if CURED:
                loss.backward()
                hidden = hidden.detach()
            else:
                loss.backward(retain_graph=True)  # cause: backward-repeated
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        now = time.perf_counter()
        if warm is None and now - began > 2:
            warm = step, now
        if now - began > SECONDS:
            break
    print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)


if __name__ == "__main__":
    main()
