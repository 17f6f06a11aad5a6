"""What the trained model tells of one client's presence, by epsilon.

One of twenty clients is a canary: its data are like nobody else's, and labelled against the trend. An attacker who
knows everything but whether it took part (the others' data, the method, the canary's data) looks at the final model
and guesses by the model's loss on the canary's data. Each run is repeated with fresh noise, with the canary and with
nothing in its place.

    python -m benchmarks.canary --runs 100

prints a table: the area under the attacker's ROC curve (0.5 is guessing), its best advantage (true less false positive
rate), and the most that epsilon allows any attacker.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import comfedl as cf
from comfedl.core.accounting import noise_for

CLIENTS, FEATURES, ROUNDS, CLIP, DELTA = 20, 10, 10, 0.5, 1e-3
CANARY = "client-19"


def federation() -> cf.FederatedData:
    """Nineteen clients of one kind, and the canary on an axis of its own."""
    generator = torch.Generator().manual_seed(0)

    def client(name: str) -> tuple[Tensor, Tensor]:
        x = 0.5 * torch.randn(20, FEATURES, generator=generator)
        x[:, -1] = 2.0 if name == CANARY else 0.0
        return x, (x[:, 0] > 0).long() if name != CANARY else torch.ones(20, dtype=torch.int64)

    return cf.FederatedData({name: client(name) for name in (f"client-{k:02}" for k in range(CLIENTS))})


def signal(privacy: cf.DP, present: bool, runs: int) -> NDArray[np.float64]:
    """The attacker's number in each run: the larger, the likelier the canary was there."""
    fed = federation()
    x, y = fed.train[CANARY]
    absent = () if present else (cf.faults.Dropout(probability=1.0, clients=[CANARY]),)
    method = cf.FedAvg(weighting="uniform", lr=0.3, local_steps=2, batch_size=None)
    found = []
    for _ in range(runs):
        torch.manual_seed(0)
        run = cf.fit(nn.Linear(FEATURES, 2), fed, method, ROUNDS, eval_every=ROUNDS, faults=absent, privacy=privacy)
        with torch.no_grad():
            found.append(-float(nn.functional.cross_entropy(run.to_module()(x), y)))
    return np.array(found)


def area(present: NDArray[np.float64], absent: NDArray[np.float64]) -> float:
    """The area under the ROC curve: the chance that a run with the canary looks more like one than one without."""
    pairs = present[:, None] - absent[None]
    return float(((pairs > 0) + 0.5 * (pairs == 0)).mean())


def advantage(present: NDArray[np.float64], absent: NDArray[np.float64]) -> float:
    """The largest true positive rate less false positive rate over all thresholds, of either sign."""
    levels = np.concatenate([present, absent])
    gaps = [(present >= level).mean() - (absent >= level).mean() for level in levels]
    return float(np.abs(gaps).max())


def allowed(epsilon: float, delta: float) -> float:
    """The most advantage under (epsilon, delta): Kairouz, Oh and Viswanath (2015)."""
    return 1.0 if epsilon > 700 else (math.exp(epsilon) - 1 + 2 * delta) / (math.exp(epsilon) + 1)


def private(epsilon: float) -> cf.DP:
    """The least noise for an epsilon, with all clients in every round; infinity is no noise."""
    if math.isinf(epsilon):
        return cf.DP(CLIP, 0.0, DELTA)
    noise = noise_for(epsilon, cf.DP(CLIP, 0.0, DELTA), CLIENTS, CLIENTS, ROUNDS)
    return cf.DP(CLIP, noise, DELTA)


def rows(epsilons: Sequence[float], runs: int) -> list[dict[str, float]]:
    """What the attacker reaches, by epsilon."""
    found = []
    for epsilon in epsilons:
        privacy = private(epsilon)
        count = 2 if math.isinf(epsilon) else runs  # without noise all runs are the same
        one, other = (signal(privacy, present, count) for present in (True, False))
        found.append(
            {
                "epsilon": epsilon,
                "noise": privacy.noise_multiplier,
                "area": area(one, other),
                "advantage": advantage(one, other),
                "allowed": allowed(epsilon, DELTA),
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--epsilons", type=float, nargs="+", default=[math.inf, 100.0, 30.0, 10.0, 3.0, 1.0])
    options = parser.parse_args()
    print("| epsilon | noise multiplier | area under the ROC curve | advantage | most that epsilon allows |")
    print("|---|---|---|---|---|")
    for row in rows(options.epsilons, options.runs):
        epsilon = "no noise" if math.isinf(row["epsilon"]) else f"{row['epsilon']:g}"
        print(
            f"| {epsilon} | {row['noise']:.3g} | {row['area']:.2f} | {row['advantage']:.2f} | {row['allowed']:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
