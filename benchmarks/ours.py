"""comfedl's rounds against plain loops, in one process and in turns: a quick check while working on speed.

    OMP_NUM_THREADS=1 python -m benchmarks.ours [W1 W2 W3 "W4 first" "W4 exact"] [--repeats 7]

The workloads are in ``workloads.py``. Times a method's round without ``fit`` around it, one client after another
("serial") and as the engine chooses ("auto"); ``python -m benchmarks.peers`` times ``fit`` itself and its peers. Prints
median CPU milliseconds per round; ratios carry over to other machines, times do not.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import count

import torch

from benchmarks.peers.loops import lean_round, loop_round
from benchmarks.peers.ours import federated, method
from benchmarks.workloads import WORKS, Work, build
from comfedl.algorithms.base import Algorithm
from comfedl.algorithms.context import RoundContext
from comfedl.core.learner import Learner, Model
from comfedl.engines import make_engine
from comfedl.models.losses import LOSSES

TURN = 0.5  # target CPU seconds per turn


def ours(work: Work, vectorize: str, algorithm: Algorithm | None = None) -> Callable[[], None]:
    """A round on comfedl's engine, by default of the workload's method."""
    algorithm, module, numbers = algorithm or method(work), build(work), count(1)
    model = Model(params={name: part.detach() for name, part in module.named_parameters()}, buffers={})
    learner, state = Learner(module, *LOSSES["cross_entropy"]), algorithm.initial_client_state(model)
    engine = make_engine("embedded", federated(work), learner, algorithm.steps(), 0, state, {"vectorize": vectorize})
    server = algorithm.initial_state(model, work.clients)

    def round() -> None:
        nonlocal server
        context = RoundContext(next(numbers), 0, work.clients, engine, recorded=False)
        server, _ = algorithm.at_round(context.number).round(server, context)
        engine.commit_round()

    return round


def seconds(round: Callable[[], None], rounds: int) -> float:
    """CPU seconds per round."""
    start = time.process_time()
    for _ in range(rounds):
        round()
    return (time.process_time() - start) / rounds


def medians(work: Work, repeats: int) -> dict[str, float]:
    """CPU milliseconds per round of each variant, measured in turns."""
    ways = {
        "loop": loop_round(work)[1],
        "lean": lean_round(work)[1],
        "serial": ours(work, "serial"),
        "auto": ours(work, "auto"),
    }
    turns = {way: 1 + int(TURN / max(seconds(round, 1), 1e-6)) for way, round in ways.items()}  # also a warm-up
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, round in ways.items():
            times[way].append(1e3 * seconds(round, turns[way]))
    return {way: statistics.median(spent) for way, spent in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time comfedl's rounds against plain loops.")
    parser.add_argument("works", nargs="*", default=["W1", "W2"], metavar="W", help=", ".join(WORKS))
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    for name in arguments.works:
        if name not in WORKS:
            parser.error(f"{name!r} is not a workload; choose from {', '.join(map(repr, WORKS))}.")
    torch.set_num_threads(1)
    columns = ("loop ms", "lean ms", "serial ms", "auto ms", "loop/serial", "loop/auto", "lean/auto")
    print(" " * 9 + "".join(f"{column:>12}" for column in columns))
    for name in arguments.works:
        ms = medians(WORKS[name], arguments.repeats)
        ratios = [ms["loop"] / ms["serial"], ms["loop"] / ms["auto"], ms["lean"] / ms["auto"]]
        print(f"{name:9}" + "".join(f"{number:12.2f}" for number in [*ms.values(), *ratios]))


if __name__ == "__main__":
    main()
