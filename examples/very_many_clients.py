"""A hundred thousand clients, of whom a hundred take part in a round.

For anyone with phones rather than hospitals. `from_flat` takes the data of all clients in one piece, and the cost of
a round depends on its participants, not on the number of clients. Each client has four of scikit-learn's digits,
drawn with replacement; one client in ten holds its camera sideways. A thousand clients, drawn once per run, are
evaluated. Expect gamma = 1 to help the worst tenth a little, and a smaller gamma to do harm: four images say little
about a client, so the weights follow noise. Three seeds, mean ± standard error.
"""

import numpy as np
from sklearn.datasets import load_digits

import comfedl as cf

CLIENTS, EACH = 100_000, 4


def phones(images: np.ndarray, labels: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images, labels, and where each client's samples begin: client i has the rows offsets[i] to offsets[i + 1] - 1."""
    rows = np.random.default_rng(seed).integers(0, len(labels), CLIENTS * EACH)
    x = images[rows].reshape(CLIENTS, EACH, 1, 8, 8)
    x[::10] = np.rot90(x[::10], axes=(3, 4))
    return x.reshape(-1, 1, 8, 8), labels[rows], np.arange(CLIENTS + 1) * EACH


def main() -> None:
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).reshape(-1, 1, 8, 8).astype(np.float32)
    fed = cf.FederatedData.from_flat(
        phones(images[:1200], labels[:1200], seed=0), validation=phones(images[1200:], labels[1200:], seed=1)
    )
    print(fed)
    model = cf.models.build("mlp", (1, 8, 8), classes=10, seed=0)
    momentum = {"server_optimizer": cf.optim.SGD(momentum=0.9), "server_average": 0.9}
    methods = {f"gamma = {gamma}": cf.Robust(gamma=gamma, lr=0.1) for gamma in (1.0, 0.3)}
    options = {"rounds": 60, "eval_every": 60, "clients_per_round": 100, "eval_clients": 1000, "save_personal": False}
    for name, method in {"equal weights": cf.ComFedL(lr=0.1, **momentum), **methods}.items():
        results = [cf.fit(model, fed, method, seed=seed, **options) for seed in range(3)]
        mean, worst = ([r.rounds[-1][f"validation.accuracy.{of}"] for r in results] for of in ("mean", "worst10"))
        error, megabytes = np.std(worst, ddof=1) / len(worst) ** 0.5, results[0].traffic["up_bytes"] / 1e6
        print(
            f"{name:13} mean {np.mean(mean):.3f}, worst tenth {np.mean(worst):.3f} ± {error:.3f}; "
            f"clients sent {megabytes:.0f} MB"
        )


if __name__ == "__main__":
    main()
