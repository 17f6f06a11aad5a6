"""Draws the pictures of the theory pages: ``python docs/pictures.py`` writes them to docs/images."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from scipy.optimize import minimize

import comfedl as cf

GAMMAS = (0.05, 0.2, 0.5, 2.0)
COLOURS = ("#440154", "#31688e", "#35b779", "#b8a900")

# Two clients with quadratic losses: where each is best served, how curved its loss is, and its share of the samples.
CENTRES = np.array([[-1.0, 0.0], [1.2, 0.9]])
CURVES = np.array([[[4.0, 1.2], [1.2, 2.4]], [[0.7, -0.4], [-0.4, 1.6]]])
SAMPLES = np.array([0.9, 0.1])


def losses(w: np.ndarray) -> np.ndarray:
    """Both clients' losses at w."""
    away = w - CENTRES
    return 0.5 * np.einsum("ij,ijk,ik->i", away, CURVES, away) + 0.1


def averaged(shares: np.ndarray) -> np.ndarray:
    """The minimiser of the mean of the losses with these shares."""
    scaled = shares[:, None, None] * CURVES
    return np.linalg.solve(scaled.sum(0), np.einsum("ijk,ik->j", scaled, CENTRES))


def robust(gamma: float) -> np.ndarray:
    """The minimiser of gamma log mean exp(loss / gamma), eq. (5)."""
    outer = cf.KL(gamma)

    def value(w: np.ndarray) -> tuple[float, np.ndarray]:
        at = torch.from_numpy(losses(w))
        pulled = np.einsum("i,ijk,ik->j", outer.weights(at).numpy(), CURVES, w - CENTRES)
        return float(outer.objective(at)), pulled

    return np.asarray(minimize(value, averaged(np.full(2, 0.5)), jac=True, method="BFGS").x)


def weights() -> Figure:
    """What a client weighs, by its loss and gamma."""
    figure, axes = plt.subplots(figsize=(6, 3.4))
    values = torch.tensor([0.20, 0.30, 0.35, 0.45, 0.55, 0.70, 0.90, 1.20], dtype=torch.float64)
    for gamma, colour in zip(GAMMAS, COLOURS, strict=True):
        r = cf.KL(gamma).weights(values)
        effective = float(1 / (r**2).sum())
        label = f"$\\gamma$ = {gamma:g}: {effective:.1f} effective clients"
        axes.plot(values, r * len(values), "o-", color=colour, label=label, markersize=4)
    axes.axhline(1, color="grey", linewidth=0.8, linestyle=":")
    axes.set(xlabel="a client's loss", ylabel="its weight, times uniform", title="Eight clients, and four gammas")
    axes.legend(frameon=False)
    return figure


def landscape() -> Figure:
    """Two clients: where the averages lie, and the way from the mean to the worst case."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), width_ratios=(1.25, 1))
    x, y = np.meshgrid(np.linspace(-2.2, 2.4, 160), np.linspace(-1.6, 2.0, 160))
    grid = np.array([losses(np.array(point)) for point in zip(x.ravel(), y.ravel(), strict=True)])
    for k, (colour, name) in enumerate((("#31688e", "client A, 90 % of the samples"), ("#d1495b", "client B, 10 %"))):
        left.contour(x, y, grid[:, k].reshape(x.shape), levels=[0.2, 0.5, 1, 2, 4], colors=colour, linewidths=0.8)
        left.plot(*CENTRES[k], "+", color=colour, markersize=10, label=f"best for {name}")
    gammas = np.logspace(-1.7, 2, 60)
    way = np.array([robust(gamma) for gamma in gammas])
    left.plot(way[:, 0], way[:, 1], color="black", linewidth=1.2)
    for point, marker, label in (
        (averaged(SAMPLES), "s", "FedAvg, by samples"),
        (averaged(np.full(2, 0.5)), "D", "uniform mean ($\\gamma \\to \\infty$)"),
        (robust(1.0), "o", "robust, $\\gamma$ = 1"),
        (way[0], "*", "worst case ($\\gamma \\to 0$)"),
    ):
        left.plot(*point, marker, color="black", markersize=7, label=label, fillstyle="none", linestyle="none")
    left.set(title="Where the optimum lies", xticks=[], yticks=[])
    left.legend(frameon=False, fontsize=7.5, loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=2)
    at = np.array([losses(point) for point in way])
    right.semilogx(gammas, at[:, 0], color="#31688e", label="client A")
    right.semilogx(gammas, at[:, 1], color="#d1495b", label="client B")
    right.semilogx(gammas, at.mean(1), color="grey", linestyle="--", label="mean")
    right.axhline(losses(averaged(SAMPLES))[1], color="#d1495b", linestyle=":", label="client B under FedAvg")
    right.set(xlabel="$\\gamma$", title="What each client gets there", ylabel="loss", ylim=(0, None))
    right.legend(frameon=False, fontsize=8, loc="lower left")
    return figure


def adapted() -> Figure:
    """Two clients in one dimension: the mean's minimiser against that of the mean after a step."""
    figure, axes = plt.subplots(figsize=(6, 3.4))
    rate, curves, centres = 0.25, np.array([3.0, 1.0]), np.array([-1.0, 1.0])
    w = np.linspace(-2, 2, 400)
    plain = 0.5 * curves[:, None] * (w - centres[:, None]) ** 2
    after = plain * (1 - rate * curves[:, None]) ** 2
    lines = {"mean loss": (plain.mean(0), "#31688e"), "mean loss after a step": (after.mean(0), "#d1495b")}
    for name, (value, colour) in lines.items():
        best = w[value.argmin()]
        axes.plot(w, value, color=colour, label=f"{name}: best at w = {best:.2f}")
        axes.plot(best, value.min(), "o", color=colour)
    for k, name in enumerate(("steep client", "flat client")):
        end, height = best - rate * curves[k] * (best - centres[k]), -0.2 - 0.35 * k
        axes.annotate("", xy=(end, height), xytext=(best, height), arrowprops={"arrowstyle": "->", "color": colour})
        axes.text(1.2, height, f"a step at the {name}", va="center", fontsize=8, color=colour)
    for centre, name in zip(centres, ("steep client", "flat client"), strict=True):
        axes.axvline(centre, color="grey", linewidth=0.7, linestyle=":")
        axes.text(centre, -1.05, f"best for the\n{name}", ha="center", va="center", fontsize=8)
    axes.set(xlabel="w", ylim=(-1.4, 5), ylabel="loss", yticks=range(6))
    axes.legend(frameon=False, loc="upper center", fontsize=8)
    return figure


def bias() -> Figure:
    """How much too large exp(loss of a batch / gamma) is in the mean, by the batch's size."""
    figure, axes = plt.subplots(figsize=(6, 3.4))
    size = np.logspace(0, 4, 100)
    for gamma, colour in zip((0.1, 0.2, 0.5, 1.0), COLOURS, strict=True):
        axes.loglog(size, np.exp(1 / (2 * size * gamma**2)), color=colour, label=f"$\\gamma$ = {gamma:g}")
    axes.axhline(1, color="grey", linewidth=0.8, linestyle=":")
    axes.set(xlabel="samples in a batch, b", ylabel="mean weight / true weight", ylim=(0.9, 100))
    axes.set_title("The bias of exp(loss / $\\gamma$), where a sample's loss has std 1")
    axes.legend(frameon=False)
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "weights": weights,
    "landscape": landscape,
    "adapted": adapted,
    "bias": bias,
}


def draw(folder: Path) -> None:
    """Draw all of them."""
    matplotlib.use("agg")
    with plt.rc_context(
        {"svg.hashsalt": "comfedl", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    ):
        for name, picture in PICTURES.items():
            figure = picture()
            figure.savefig(folder / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})
            plt.close(figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "images")
