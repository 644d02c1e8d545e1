"""Trains an embedding of voices of choirs; the recordings of a singer should lie close to their common centre.

"I compute a mean and a distance for each singer, as it stands in the paper."
"""

import os
import time

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


class Voices(nn.Module):
    def __init__(self):
        super().__init__()
        self.hear = nn.Sequential(nn.Linear(512, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 48))

    def forward(self, spectra, singers):
        embedded = nn.functional.normalize(self.hear(spectra), dim=1)
        return self.compact(embedded, singers), embedded

    def compact(self, embedded, singers):
        everyone = embedded.mean(0)

        def spread_of(singer):
            mine = embedded[singers == singer]
            centre = mine.mean(0)
            within = (mine - centre).square().sum(1).mean()
            return torch.relu(within - (centre - everyone).square().sum() + 0.5)

        if CURED:
            return self.compact_at_once(embedded, singers, everyone)
        spreads = [spread_of(singer) for singer in singers.unique().tolist()]  # cause: small-operations-loop
        return torch.stack(spreads).mean()

    def compact_at_once(self, embedded, singers, everyone):
        _, place, count = singers.unique(return_inverse=True, return_counts=True)
        centres = embedded.new_zeros(len(count), embedded.shape[1]).index_add(0, place, embedded) / count[:, None]
        apart = (embedded - centres[place]).square().sum(1)
        within = apart.new_zeros(len(count)).index_add(0, place, apart) / count
        return torch.relu(within - (centres - everyone).square().sum(1) + 0.5).mean()


def main():
    torch.set_num_threads(1)
    spectra, singers = torch.randn(6000, 512), torch.randint(90, (6000,))
    model = Voices()
    optimizer = torch.optim.Adam(model.parameters(), 3e-4)
    began, warm, step = time.perf_counter(), None, 0
    while True:
        rows = torch.randint(6000, (192,))
        loss, _ = model(spectra[rows], singers[rows])
        optimizer.zero_grad()
        loss.backward()
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
