"""One peer on one workload, in its own process: ``python -m benchmarks.peers.worker PEER WORK [CORE]``."""

from __future__ import annotations

import os
import sys
import time

STARTED = time.time()


def main(peer: str, work: str, core: str | None = None) -> None:
    if core is not None:
        os.sched_setaffinity(0, {int(core)})  # before torch counts the cores; children inherit it
    import importlib

    import torch

    from benchmarks.peers.pace import Pace
    from benchmarks.peers.roster import PEERS
    from benchmarks.workloads import WORKS

    torch.set_num_threads(1)
    module, _, function = PEERS[peer].module.partition(":")
    run = getattr(importlib.import_module(f"benchmarks.peers.{module}"), function or "run")
    run(WORKS[work], Pace(WORKS[work], STARTED, tree=peer == "flwr"))


if __name__ == "__main__":
    main(*sys.argv[1:])
