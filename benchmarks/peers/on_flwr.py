"""Flower: its simulation engine on Ray with one actor, its FedAvg strategy, and a client as in its documentation.

The model and the data stay in the actor from one message to the next, and no round is evaluated.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from functools import cache
from typing import Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch.nn.functional import cross_entropy

from benchmarks.peers.pace import Pace
from benchmarks.workloads import LR, WORKS, Work, build, parts

client_app = ClientApp()


@cache
def cached(name: str) -> tuple[Any, Any]:
    """The model and the clients' data, created once per process."""
    torch.set_num_threads(1)
    return build(WORKS[name]), parts(WORKS[name])


@client_app.train()
def train(message: Message, context: Context) -> Message:
    name = str(message.content["config"]["work"])
    work = WORKS[name]
    model, clients = cached(name)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = clients[int(context.node_config["partition-id"])]
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    passes = samples = 0
    for rows in torch.randperm(len(x)).split(work.batch):
        optimizer.zero_grad()
        cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        passes += 1
        samples += len(rows)
    metrics = {"num-examples": len(x), "passes": passes, "batch": samples / passes}
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)}
    return Message(content=RecordDict(content), reply_to=message)


class Paced(FedAvg):
    """FedAvg that calls the pace before the next round starts."""

    def __init__(self, pace: Pace) -> None:
        super().__init__(fraction_train=1.0, fraction_evaluate=0.0)
        self.pace = pace

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: Any, grid: Grid) -> Iterable[Message]:
        if server_round > 1:
            self.pace(lambda: arrays.to_torch_state_dict().values())
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[Any, Any]:
        replies = list(replies)
        if server_round == 1:
            passes: dict[int, int] = {}
            for reply in replies:
                metrics = reply.content["metrics"]
                batch = int(metrics["batch"])
                passes[batch] = passes.get(batch, 0) + int(metrics["passes"])
            self.pace.checks = {"passes": passes, "optimizer_steps": sum(passes.values())}
        return super().aggregate_train(server_round, replies)


def run(work: Work, pace: Pace) -> None:
    name = next(name for name, known in WORKS.items() if known == work)
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        start = ArrayRecord(build(work).state_dict())
        Paced(pace).start(grid, start, num_rounds=10**9, train_config=ConfigRecord({"work": name}), timeout=10**6)

    config = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": 1, "_temp_dir": tempfile.gettempdir()},
    }
    run_simulation(server_app, client_app, work.clients, backend_config=config)
