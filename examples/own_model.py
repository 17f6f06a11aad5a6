"""Your own PyTorch model: a residual network with BatchNorm, trained over five sites without changing a line of it.

For anyone who already has a model. `fit` takes any `nn.Module`, leaves it unchanged, and returns the trained
parameters. Expect about 97 % accuracy on average, and the same accuracy from the trained module as in the run's
records.
"""

import torch
from torch import nn

import comfedl as cf


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.layers(x))


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), Block(16), nn.MaxPool2d(2), Block(16), nn.Flatten(), nn.Linear(16 * 4 * 4, 10)
    )
    fed = cf.load("digits", cf.partition.Dirichlet(clients=5, alpha=0.5), seed=0)
    result = cf.fit(model, fed, cf.Robust(gamma=0.1, lr=0.05), rounds=20, eval_every=20)

    trained = result.to_module()  # in evaluation mode; result.to_module("client-3") is that client's own
    with torch.no_grad():
        for name, (x, y) in fed.test.items():
            print(f"{name}: {len(fed.train[name][1]):3} images, test accuracy {accuracy(trained, x, y):.3f}")
        worst = min(accuracy(trained, x, y) for x, y in fed.test.values())
    print(f"worst client: {worst:.3f} by the module, {result.rounds[-1]['test.accuracy.worst']:.3f} in the records")


def accuracy(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    return (module(x.float()).argmax(dim=1) == y).float().mean().item()


if __name__ == "__main__":
    main()
