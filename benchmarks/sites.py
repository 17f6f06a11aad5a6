"""The cost of a round with very many sites: traffic as comfedl counts it, and a simulated estimate of the time.

    python -m benchmarks.sites [--server-mbit 1000] [--up-mbit 20] [--down-mbit 100] [--train-s 10] [--spread 0.5] ...

Measured: the bytes of each method (``Result.traffic`` of short runs on the four-layer CNN), and the time that a server
takes to read, check and aggregate replies. Assumed, and stated in the output: link speeds and training times. The time
of a round is then simulated, without a network: the server's link sends to one site after another, each site receives
at its own speed, trains for a log-normally distributed time, and sends; the link and one core process the replies in
the order of arrival. With a middle layer, each aggregator does this for its share of the sites on its own link, and
sends one sum to the server. The results go to ``sites.json`` and ``sites.md``.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load, save

import comfedl as cf
from benchmarks.peers.report import machine
from comfedl.engines.replies import LocalReplies
from comfedl.utils import tree

ROOT = Path(__file__).resolve().parents[1]
COMMON: dict[str, Any] = {"lr": 0.01, "local_steps": 1, "batch_size": 4}
METHODS = {
    "FedAvg": cf.FedAvg(**COMMON),
    "ComFedL, KL": cf.ComFedL(outer=cf.KL(0.2), **COMMON),
    "DAMAML": cf.DAMAML(0.05, 0.5, **COMMON),
    "DRFA": cf.DRFA(0.05, **COMMON),
    "q-FedAvg": cf.QFedAvg(0.5, **COMMON),
    "Ditto": cf.Ditto(lam=0.5, **COMMON),
}
MODELS = {"the four-layer CNN": None, "11.2 million parameters": 44_800_000}
SITES = (10, 100, 1_000, 10_000)


@dataclass(frozen=True)
class World:
    """The assumptions; speeds in Mbit/s, times in seconds."""

    server_mbit: float = 1000.0
    up_mbit: float = 20.0
    down_mbit: float = 100.0
    train_s: float = 10.0
    spread: float = 0.5
    latency_s: float = 0.1
    rounds: int = 50


def ledger(clients: int = 8, rounds: int = 2) -> dict[str, dict[str, float]]:
    """Bytes that each method sends to and receives from a participant per round."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 3, 32, 32, generator=generator), torch.randint(0, 10, (8,), generator=generator)
    fed = cf.FederatedData({str(i): (x, y) for i in range(clients)})
    found = {}
    for name, method in METHODS.items():
        model = cf.models.build("cnn4", (3, 32, 32), 10, 0)
        with warnings.catch_warnings(action="ignore"):
            traffic = cf.fit(model, fed, method, rounds, eval_every=rounds, clients_per_round=clients // 2).traffic
        share = rounds * (clients // 2)
        found[name] = {"down": traffic["down_bytes"] / share, "up": traffic["up_bytes"] / share}
    return found


def seconds_per_byte(size: int, replies: int = 8) -> float:
    """The time of one server core to read, check and aggregate a reply, per byte."""
    sent = save({"params": torch.randn(size // 4)})
    times = []
    for _ in range(5):
        start = time.perf_counter()
        read = [{"model": load(sent)} for _ in range(replies)]
        assert all(tree.finite(reply["model"]) for reply in read)
        LocalReplies(range(replies), read).weighted_sum("model", torch.full((replies,), 1 / replies))
        times.append((time.perf_counter() - start) / (replies * size))
    return float(np.median(times))


def seconds(world: World, sites: int, size: int, core: float, rng: np.random.Generator) -> tuple[float, float]:
    """One round of an aggregator: the time until it has all replies, and until all its sites have trained."""
    link, mega = world.server_mbit, 8e-6 * size
    sent = np.arange(1, sites + 1) * mega / link
    received = np.maximum(sent, sent - mega / link + mega / world.down_mbit) + world.latency_s
    trained = received + world.train_s * rng.lognormal(0.0, world.spread, sites)
    arrives = np.sort(trained + mega / world.up_mbit + world.latency_s)
    return _last_served(arrives, max(mega / link, core * size)), float(trained.max())


def _last_served(arrivals: NDArray[np.float64], each: float) -> float:
    """When the last arrival is done if they are served one after another, ``each`` seconds long."""
    left = np.arange(len(arrivals), 0, -1) * each
    return float((arrivals + left).max())


def layered(world: World, sites: int, size: int, core: float, groups: int, rng: np.random.Generator) -> float:
    """The time of a round with aggregators between the server and the sites."""
    mega = 8e-6 * size
    begins = np.arange(1, groups + 1) * mega / world.server_mbit + world.latency_s
    shares = [len(part) for part in np.array_split(np.arange(sites), groups)]
    ends = [start + seconds(world, share, size, core, rng)[0] for start, share in zip(begins, shares, strict=True)]
    arrives = np.sort(np.array(ends)) + world.latency_s
    return _last_served(arrives, max(mega / world.server_mbit, core * size))


def estimate(world: World, model: str, size: int, core: float) -> list[dict[str, Any]]:
    """Medians over simulated rounds with full participation."""
    rows = []
    for sites in SITES:
        rng, groups = np.random.default_rng(sites), math.isqrt(sites)
        flat = [seconds(world, sites, size, core, rng) for _ in range(world.rounds)]
        rows.append(
            {
                "model": model,
                "bytes": size,
                "sites": sites,
                "server_bytes": 2 * size * sites,
                "trained_s": float(np.median([trained for _, trained in flat])),
                "flat_s": float(np.median([end for end, _ in flat])),
                "groups": groups,
                "layered_s": float(np.median([layered(world, sites, size, core, groups, rng) for _ in flat])),
                "layered_server_bytes": 2 * size * groups,
                "reply_memory_bytes": size * sites,
            }
        )
    return rows


def as_markdown(found: dict[str, Any]) -> str:
    where, world = found["machine"], found["assumed"]
    lines = [
        "Bytes per participant and round, four-layer CNN in float32, as comfedl counts them:",
        "",
        "| method | to the site | from the site |",
        "|---|---|---|",
    ]
    lines += [f"| {name} | {each['down']:,.0f} | {each['up']:,.0f} |" for name, each in found["ledger"].items()]
    lines += [
        "",
        f"Simulated: all sites participate; server and aggregators {world['server_mbit']:g} Mbit/s each way, sites "
        f"{world['down_mbit']:g} down and {world['up_mbit']:g} up, {world['latency_s']:g} s latency; training "
        f"{world['train_s']:g} s (median), log-normal with spread {world['spread']:g}; no site fails. Medians of "
        f"{world['rounds']} rounds. The model goes down and up once (FedAvg, ComFedL, DAMAML, Ditto).",
        "",
        "| model | sites | through the server | replies in memory | last site trained after | round, flat "
        "| aggregators | through the server | round |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['model']} | {row['sites']:,} | {_size(row['server_bytes'])} | {_size(row['reply_memory_bytes'])} "
        f"| {row['trained_s']:.0f} s | {row['flat_s']:.0f} s | {row['groups']} "
        f"| {_size(row['layered_server_bytes'])} | {row['layered_s']:.0f} s |"
        for row in found["estimate"]
    ]
    rates = " and ".join(f"{1e-6 / each:,.0f} MB/s ({name})" for name, each in found["core_s_per_byte"].items())
    lines += [
        "",
        f"One core of the server reads, checks and aggregates {rates}, measured on {where['cpu']}, torch "
        f"{where['torch']}, commit {where['commit']}, {where['date']}, load {where['load_at_start'][0]:.1f}.",
    ]
    return "\n".join(lines) + "\n"


def _size(count: float) -> str:
    """A readable number of bytes.

    >>> _size(1_230_000)
    '1.2 MB'
    """
    for unit, bound in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= bound:
            return f"{count / bound:,.1f} {unit}"
    return f"{count:.0f} B"


def main() -> None:
    parser = argparse.ArgumentParser(description="Traffic and simulated time of rounds with many sites.")
    for name, value in asdict(World()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "benchmarks")
    given = vars(parser.parse_args())
    out = given.pop("out")
    torch.set_num_threads(1)
    world, sent = World(**given), ledger()
    sizes = {name: size or round(sent["FedAvg"]["up"]) for name, size in MODELS.items()}
    core = {name: seconds_per_byte(size) for name, size in sizes.items()}
    found = {
        "machine": machine(ROOT, torch.__version__, None),
        "assumed": asdict(world),
        "ledger": sent,
        "core_s_per_byte": core,
        "estimate": [row for name, size in sizes.items() for row in estimate(world, name, size, core[name])],
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "sites.json").write_text(json.dumps(found, indent=1) + "\n")
    (out / "sites.md").write_text(as_markdown(found))
    print(as_markdown(found))


if __name__ == "__main__":
    main()
