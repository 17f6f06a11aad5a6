"""The model, a site's data, and how it trains and tests: nothing here knows how the sites are weighted."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SIZES = (1200, 150)  # of the first two sites, in images; any further one has as many as the second


class Net(nn.Module):
    """A small network for images of 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x):
        return self.layers(x)


def load_data(partition_id: int, num_partitions: int, batch_size: int):
    """A site's train and test images: the first site has most of them, and the second one's scanner is turned."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images / 16, dtype=torch.float32), torch.tensor(digits.target)
    sizes = [SIZES[min(site, 1)] for site in range(num_partitions)]
    start = sum(sizes[:partition_id])
    x, y = (part[start : start + sizes[partition_id]] for part in (images, labels))
    if partition_id == 1:
        x = x.rot90(dims=(1, 2))
    held_out = len(x) // 5
    train, test = TensorDataset(x[held_out:], y[held_out:]), TensorDataset(x[:held_out], y[:held_out])
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(test, batch_size=256)


def train(net, loader, steps: int, lr: float) -> float:
    """Take this many optimiser steps; returns their mean loss."""
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    total, taken = 0.0, 0
    while taken < steps:
        for x, y in loader:
            if taken == steps:
                break
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            total, taken = total + loss.item(), taken + 1
    return total / steps


@torch.no_grad()
def test(net, loader) -> tuple[float, float]:
    """The mean loss and the accuracy on all samples of a loader."""
    net.eval()
    loss, correct = 0.0, 0
    for x, y in loader:
        output = net(x)
        loss += nn.functional.cross_entropy(output, y, reduction="sum").item()
        correct += int((output.argmax(dim=1) == y).sum())
    return loss / len(loader.dataset), correct / len(loader.dataset)
