"""A model for each site, and for a site that was never seen: FedAvg, FedMAML and Ditto.

For anyone whose sites want different things: here each of eleven sites sees three kinds of digit. With FedAvg and
FedMAML a site takes five steps from the shared model on its own data, and FedMAML trains the shared model as a start
for these steps. With Ditto each site keeps its own model, held near the shared one. A twelfth site joins later and
takes ten steps. Expect Ditto's models to be best at sites that have about a hundred images, FedMAML's shared model to
be useful only as a start, and every method to serve the new site, whose task is easy. Test data, three seeds.
"""

import numpy as np
import torch

import comfedl as cf

METHODS = {
    "FedAvg": cf.FedAvg(lr=0.1, personal_steps=5),
    "FedMAML": cf.FedMAML(lr=0.1, adapt_lr=0.1, adapt_steps=5),
    "Ditto": cf.Ditto(lr=0.1, lam=0.1),
}
SCORES = ("test.accuracy.mean", "test.personal_accuracy.mean", "test.personal_accuracy.worst")


def main() -> None:
    print("accuracy  shared  personal models  new site")
    print("          mean    mean    worst    shared  own")
    for name, method in METHODS.items():
        scores = []
        for seed in range(3):
            digits = cf.load("digits", cf.partition.Shards(clients=12, classes=3), seed=seed)
            *known, new = digits.names
            train, test = ({name: split[name] for name in known} for split in (digits.train, digits.test))
            model = cf.models.build("mlp", (1, 8, 8), classes=10, seed=seed)
            result = cf.fit(model, cf.FederatedData(train, test=test), method, rounds=60, seed=seed, eval_every=60)
            row, module = [result.rounds[-1][key] for key in SCORES], result.to_module()
            for steps in (0, 10):
                adapt(module, *digits.train[new], steps)
                row.append(accuracy(module, *digits.test[new]))
            scores.append(row)
        print(f"{name:8}", *(f" {score:.3f} " for score in np.mean(scores, axis=0)))


def adapt(module: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int) -> None:
    """Plain torch; `comfedl personalise RUN --data FILE` does the same from a run's folder."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(x.float()), y).backward()
        optimizer.step()


def accuracy(module: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    return (module(x.float()).argmax(dim=1) == y).float().mean().item()


if __name__ == "__main__":
    main()
