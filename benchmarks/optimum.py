"""How near Robust comes to the optimum of its objective: one class of Fashion-MNIST a client, logistic regression.

    OMP_NUM_THREADS=1 python -m benchmarks.optimum [--seeds 5] [--triples 5]

300 rounds of five steps of batch 50, gamma 0.1, all training images. AFL's benchmark (t-shirt, pullover, shirt); other
triples, of which the first is the hardest by eye (pullover, coat, shirt) and the others are drawn; and all ten
classes. The optimum of eq. (5), and that of equal weights, are computed centrally (``quality/optimum.py``). Every line
has the worst client's test accuracy.
"""

from __future__ import annotations

import argparse
import math
import warnings

import numpy as np
import torch

import comfedl as cf
from benchmarks.quality.optimum import centrally
from comfedl.algorithms.base import Algorithm

GAMMA, ROUNDS, BATCH = 0.1, 300, 50
LRS = (0.003, 0.01, 0.03, 0.1)
AFL, HARD = (0, 2, 6), (2, 4, 6)


def triples(count: int) -> list[tuple[int, ...]]:
    """AFL's, the hard one, and more that are drawn at random."""
    generator, found = np.random.default_rng(19), [AFL, HARD]
    while len(found) < count:
        drawn = tuple(sorted(generator.choice(10, 3, replace=False).tolist()))
        found += [drawn] if drawn not in found else []
    return found[:count]


def federation(classes: tuple[int, ...]) -> cf.FederatedData:
    partition = cf.partition.Shards(clients=len(classes), classes=1)
    return cf.load("fashion-mnist", partition, validation=0, classes=list(classes))


def worst(fed: cf.FederatedData, method: Algorithm, seed: int) -> tuple[float, bool]:
    """The worst client's test accuracy after the last round, and whether the weights jumped."""
    model = cf.models.build("logistic", fed.train.x.shape[1:], len(fed), seed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = cf.fit(model, fed, method, ROUNDS, seed, eval_every=ROUNDS)
    jumped = any("jump from client to client" in str(warning.message) for warning in caught)
    return float(result.rounds[-1]["test.accuracy.worst"] or 0.0), jumped


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare Robust with the optimum of its objective.")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--triples", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    momentum = cf.optim.SGD(momentum=0.9)
    for classes in [*triples(given.triples), tuple(range(10))]:
        fed = federation(classes)
        best = centrally(fed, (math.inf, GAMMA))
        equal, robust = (found["test.accuracy.worst"] for found in best.values())
        print(f"classes {classes}: optimum {robust:.3f}; of equal weights {equal:.3f}", flush=True)
        for lr in LRS:
            common = {"lr": lr, "batch_size": BATCH}
            methods = {
                "equal weights, the same optimiser": cf.ComFedL(
                    server_optimizer=momentum,
                    server_average=0.9,
                    **common,  # type: ignore[arg-type]
                ),
                "Robust": cf.Robust(GAMMA, **common),  # type: ignore[arg-type]
            }
            for name, method in methods.items():
                scores = [worst(fed, method, seed) for seed in range(given.seeds)]
                values = np.array([score for score, _ in scores])
                cycles = sum(jumped for _, jumped in scores)
                print(
                    f"  lr {lr:<6g}{name:35}{values.mean():.3f} (least {values.min():.3f}), {cycles} cycle", flush=True
                )


if __name__ == "__main__":
    main()
