"""The CPU seconds of the process that answers one message at a site, by phase: imports, data, engine, step.

    python -m benchmarks.flower_process

It does in one process what Flower's client process does between its start and its reply, on as much data as a third
of the digits.
"""

import time

points = [("python", time.process_time())]

import flwr.app  # noqa: E402
import flwr.clientapp  # noqa: E402, F401

points.append(("import of flwr", time.process_time()))

import torch  # noqa: E402

points.append(("import of torch", time.process_time()))

from comfedl.flower import client_app  # noqa: E402
from comfedl.flower.apps import site_engine  # noqa: E402

assert callable(client_app)
points.append(("import of comfedl", time.process_time()))

import comfedl as cf  # noqa: E402

CONFIG = """
rounds = 1
data.name = "sites"
model.name = "logistic"
algorithm.name = "fedavg"
flower.outputs = 10
"""


def main() -> None:
    fed = cf.FederatedData({"site": (torch.rand(600, 8, 8), torch.randint(10, (600,)))})
    points.append(("data", time.process_time()))
    engine = site_engine(CONFIG, fed)
    points.append(("engine", time.process_time()))
    params = {"weight": torch.zeros(10, 64), "bias": torch.zeros(10)}
    names = dict(zip(("1.weight", "1.bias"), params.values(), strict=True))
    engine.run("train", [0], {"model": {"params": names, "buffers": {}}}, 1)
    points.append(("step", time.process_time()))
    before = 0.0
    for name, seconds in points:
        print(f"{name:20} {seconds - before:.3f}")
        before = seconds


if __name__ == "__main__":
    main()
