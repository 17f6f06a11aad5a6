"""A metric of your own, recorded for every client and used for early stopping.

For anyone to whom plain accuracy is not what counts. A metric is a function of a client's outputs and labels. Here
one is the probability given to the true digit, for the digit where it is lowest. The other is the share of confident
mistakes; less is better, so its worst client is the one with the most. Expect the worst digit to be far below the
accuracy, and training to stop when it no longer improves.
"""

import torch
from torch import Tensor

import comfedl as cf


def worst_digit(output: Tensor, y: Tensor) -> Tensor:
    """The mean chance given to the truth, for the digit of the client's where it is smallest."""
    chance = output.softmax(dim=1).gather(1, y[:, None]).squeeze(1)
    return torch.stack([chance[y == digit].mean() for digit in y.unique()]).min()


def confident_mistakes(output: Tensor, y: Tensor) -> Tensor:
    chance, said = output.softmax(dim=1).max(dim=1)
    return ((said != y) & (chance > 0.8)).float().mean()


def main() -> None:
    fed = cf.load("digits", cf.partition.Dirichlet(clients=5, alpha=0.5), seed=0)
    model = cf.models.build("mlp", (1, 8, 8), classes=10, seed=0)
    result = cf.fit(
        model,
        fed,
        cf.FedAvg(lr=0.1, server_optimizer=cf.optim.SGD(momentum=0.9)),
        rounds=200,
        eval_every=1,
        metrics={"worst_digit": worst_digit, "mistakes": cf.Metric(confident_mistakes, smaller_is_better=True)},
        stop=cf.EarlyStopping("validation.worst_digit.mean", patience=15),
    )
    for row in result.clients:
        if row["round"] == result.best_round:
            print(
                f"{row['client']}: accuracy {row['test.accuracy']:.3f}, worst digit {row['test.worst_digit']:.3f}, "
                f"confident mistakes {row['test.mistakes']:.3f}"
            )
    print(f"the worst of them: {result.row['test.worst_digit.worst']:.3f}, {result.row['test.mistakes.worst']:.3f}")
    print(result.stopped)


if __name__ == "__main__":
    main()
