"""Augmentation: training images are shifted at random as batches are drawn, evaluation sees them as they are.

For anyone with few images per site: a transform changes batches, not data, and draws from a generator with a key of its
own, so runs resume and repeat exactly. Ten sites have about 20 digits each to train on. Expect noise to help a little,
and shifts to hurt a lot: these digits fill their 8x8 pixels, so a shift cuts them off and adds what the test data never
have. Test data, mean over three seeds.
"""

import numpy as np
import torch

import comfedl as cf


def noisy(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A transform of one's own: all randomness is from the generator."""
    return x + 0.2 * torch.randn(x.shape, generator=generator)


TRANSFORMS = {"none": None, "shifted": cf.transform.Crop(padding=1), "noisy": noisy}


def main() -> None:
    for name, transform in TRANSFORMS.items():
        scores = []
        for seed in range(3):
            fed = cf.load("digits", cf.partition.IID(clients=10), seed=seed, validation=0.0, test=0.88)
            model = cf.models.build("mlp", (1, 8, 8), classes=10, seed=seed)
            method = cf.FedAvg(lr=0.1)
            result = cf.fit(model, fed, method, rounds=100, seed=seed, eval_every=100, transform=transform)
            scores.append([result.rounds[-1][f"test.accuracy.{what}"] for what in ("mean", "worst")])
        mean, worst = np.mean(scores, axis=0)
        print(f"{name:8} accuracy {mean:.3f}, worst site {worst:.3f}")


if __name__ == "__main__":
    main()
