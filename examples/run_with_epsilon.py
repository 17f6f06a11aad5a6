"""A run with an epsilon: what differential privacy of the clients costs, for averaging and for robust weights.

For anyone who must promise a client that the model hardly depends on its taking part. Two thousand generated clients of
twenty samples; each takes part in a round with a probability of a tenth. Every update is clipped, and the sum gets
noise. One client in ten turns a feature around, and is outvoted by averaging. Expect noise to cost little with this
many clients, and epsilon to fall as it grows. A noise_seed makes the output repeatable; leave it out in real use.
"""

import torch

import comfedl as cf

CLIENTS, FEATURES = 2000, 8


def client(seed: int) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Train and test data; the labels of every tenth client depend on the second feature the other way around."""
    x = torch.randn(40, FEATURES, generator=torch.Generator().manual_seed(seed))
    sign = -1.0 if seed % 10 == 0 else 1.0
    y = (x[:, 0] + 0.5 * sign * x[:, 1] > 0).long()
    return (x[:20], y[:20]), (x[20:], y[20:])


def main() -> None:
    data = {f"client-{k:04}": client(k) for k in range(CLIENTS)}
    fed = cf.FederatedData(
        {name: train for name, (train, _) in data.items()}, test={name: test for name, (_, test) in data.items()}
    )
    methods = {
        "FedAvg": cf.FedAvg(weighting="uniform", lr=0.3, batch_size=None),
        "Robust": cf.Robust(gamma=0.1, cap=4, lr=0.3, batch_size=None),
    }
    for noise in (0.0, 1.0, 4.0):
        for name, method in methods.items():
            torch.manual_seed(0)
            privacy = cf.DP(clip=0.5, noise_multiplier=noise, delta=1e-4, sampling="poisson", noise_seed=0)
            model = torch.nn.Linear(FEATURES, 2)
            run = cf.fit(model, fed, method, rounds=60, clients_per_round=200, eval_every=60, privacy=privacy)
            row = run.rounds[-1]
            epsilon = f"epsilon {row['epsilon']:5.2f}" if noise else "no promise   "
            accuracy = f"mean {row['test.accuracy.mean']:.3f}, worst tenth {row['test.accuracy.worst10']:.3f}"
            print(f"{name}, noise {noise:.0f}: {epsilon}, test accuracy {accuracy}")
    print(run.privacy)


if __name__ == "__main__":
    main()
