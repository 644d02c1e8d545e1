"""Trains a regression of house prices and posts each step to our experiment server.

"It is a tiny net; how can a step take 30 ms?"
"""

import json
import os
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from torch import nn

SECONDS = float(os.environ.get("SECONDS", "22"))
CURED = os.environ.get("CURED") == "1"


class Tracker(BaseHTTPRequestHandler):
    """Stands in for the server, which is at the other end of the country."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(0.015)
        self.send_response(204)
        self.end_headers()

    def log_message(self, *args):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Tracker)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/metrics"


def post(**metrics):
    body = json.dumps(metrics).encode()
    urllib.request.urlopen(urllib.request.Request(url, body)).close()  # cause: hot-line


torch.set_num_threads(1)
houses = torch.rand(8192, 24)
prices = houses @ torch.rand(24) + 0.1 * torch.rand(8192)
net = nn.Sequential(nn.Linear(24, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 1))
optimizer = torch.optim.Adam(net.parameters())
began, warm, step = time.perf_counter(), None, 0
while (now := time.perf_counter()) - began < SECONDS:
    rows = torch.randint(8192, (512,))
    loss = nn.functional.huber_loss(net(houses[rows]).squeeze(1), prices[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if not CURED or step % 50 == 0:
        post(step=step, loss=loss.item())  # cause: hot-line
    if warm is None and time.perf_counter() - began > 2:
        warm = step, time.perf_counter()
print(f"step_ms {1000 * (now - warm[1]) / (step - warm[0]):.3f}", flush=True)
