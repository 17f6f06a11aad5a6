"""A two-level problem of your own: a fairness constraint on the gap between two groups, at every clinic.

For anyone who must treat groups alike. The gap between two groups' mean predictions is a function of means over all
patients, not a sum over patients. So the inner map computes the loss and the means, and the outer function penalises
a gap above 0.05. The task: has the disease progressed more than in most patients? The groups: patients aged 50 or
over, and younger ones. Expect the gap to shrink towards 0.05 on train data and less on test data, at some cost in
accuracy at the worst clinic. Averages over three draws of the clinics.
"""

import numpy as np
import torch
from sklearn.datasets import load_diabetes
from torch import Tensor

import comfedl as cf

TOLERATED = 0.05
WHOLE = {"lr": 0.1, "local_steps": 1, "batch_size": None, "server_optimizer": cf.optim.SGD(momentum=0.9)}
Batch = tuple[Tensor, Tensor]  # x has the group, 0 or 1, in its last column


def score(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return x[:, :-1] @ params["weights"] + params["bias"]


def inner(params: dict[str, Tensor], batch: Batch) -> Tensor:
    x, y = batch
    logit, older = score(params, x), x[:, -1]
    chance = torch.sigmoid(logit)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logit, y)
    return torch.stack([loss, (chance * older).mean(), (chance * (1 - older)).mean(), older.mean()])


def gap(means: Tensor) -> Tensor:
    return (means[1] / means[3] - means[2] / (1 - means[3])).abs()


def penalised(strength: float) -> cf.Composition:
    return cf.Composition(inner, lambda means, batch: means[0] + strength * torch.relu(gap(means) - TOLERATED) ** 2)


def clinics(seed: int) -> cf.FederatedData:
    """Four clinics with a half, a quarter and twice an eighth of the patients; a third of each is for test."""
    x, target = load_diabetes(return_X_y=True)
    x = x[:, [0, 1, 2, 3, 8, 9]]  # the cholesterols are left out: they nearly repeat each other
    age = load_diabetes(scaled=False).data[:, 0]
    x = torch.tensor(np.column_stack([x / x.std(axis=0), age >= 50]))
    y = torch.tensor(target > np.median(target)).double()
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(y)))
    dealt = {f"clinic-{k}": rows for k, rows in enumerate(order.split([220, 110, 56, 56]))}
    train = {name: (x[rows[len(rows) // 3 :]], y[rows[len(rows) // 3 :]]) for name, rows in dealt.items()}
    test = {name: (x[rows[: len(rows) // 3]], y[rows[: len(rows) // 3]]) for name, rows in dealt.items()}
    return cf.FederatedData(train, test=test)


def main() -> None:
    start = {"weights": torch.zeros(6, dtype=torch.float64), "bias": torch.zeros((), dtype=torch.float64)}
    for strength in (0, 10, 100):
        method, found = cf.ComFedL(problem=penalised(strength), **WHOLE), []
        for seed in range(3):
            fed = clinics(seed)
            params = cf.fit(start, fed, method, rounds=200, seed=seed, eval_every=200).params
            right = [((score(params, x) > 0) == (y > 0)).double().mean() for x, y in fed.test.values()]
            trained, tested = ([gap(inner(params, data)) for data in split.values()] for split in (fed.train, fed.test))
            found.append([max(trained), np.mean(tested), min(right), np.mean(right)])
        train, test, worst, mean = np.mean(found, axis=0)
        print(
            f"penalty {strength:3}: largest gap of a clinic {train:.2f}, on test data {test:.2f} on average; "
            f"test accuracy: mean {mean:.3f}, worst {worst:.3f}"
        )


if __name__ == "__main__":
    main()
