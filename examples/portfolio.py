"""A two-level problem of your own: a mean-variance portfolio over four markets, checked against its closed form.

For anyone whose objective is a function of a mean. The variance is one: E[r^2] - E[r]^2. So the inner map computes
the mean return and the mean squared return, and the outer function combines them. On a batch of b days the outer
gradient is biased, since a batch has on average only (b - 1) / b of the variance. Expect weights about 1 / b too
large, and the closed form when each step uses all days. The returns are generated.
"""

import torch

import comfedl as cf

RISK = 2.0
Returns = dict[str, torch.Tensor]


def inner(params: dict[str, torch.Tensor], batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    returns = batch[0] @ params["weights"]
    return {"mean": returns.mean(), "square": (returns**2).mean()}


def outer(y: dict[str, torch.Tensor], batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return -y["mean"] + RISK * (y["square"] - y["mean"] ** 2)


def markets() -> Returns:
    """A thousand days of five assets in four markets, which differ in how the assets move together; in per cent."""
    generator = torch.Generator().manual_seed(0)
    mixes = torch.randn(4, 5, 5, generator=generator, dtype=torch.float64) / 5**0.5 + torch.eye(5, dtype=torch.float64)
    days = torch.randn(4, 1000, 5, generator=generator, dtype=torch.float64) @ mixes
    drift = torch.tensor([0.1, 0.3, 0.5, 0.2, 0.4], dtype=torch.float64)
    return {f"market-{k}": days[k] + drift for k in range(4)}


def closed_form(returns: Returns) -> torch.Tensor:
    """Where the gradient of the mean over markets is zero: 2 RISK (mean covariance) w = mean return."""
    covariance = torch.stack([x.T.cov(correction=0) for x in returns.values()]).mean(dim=0)
    mean = torch.stack([x.mean(dim=0) for x in returns.values()]).mean(dim=0)
    return torch.linalg.solve(2 * RISK * covariance, mean)


def main() -> None:
    returns = markets()
    best = closed_form(returns)
    print("closed form:    ", " ".join(f"{weight:6.3f}" for weight in best))
    start = {"weights": torch.zeros(5, dtype=torch.float64)}
    for size in (10, 100, None):
        method = cf.ComFedL(
            problem=cf.Composition(inner, outer), lr=0.05, local_steps=1, batch_size=size, server_average=0.998
        )
        found = cf.fit(start, cf.FederatedData(returns), method, rounds=1000, eval_every=1000).params["weights"]
        distance = ((found - best).norm() / best.norm()).item()
        days = f"{size} days" if size else "all days"
        print(f"{days + ' a step:':16}", " ".join(f"{weight:6.3f}" for weight in found), f" off by {distance:.1%}")


if __name__ == "__main__":
    main()
