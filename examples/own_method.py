"""A method of your own in twenty lines: weights between sample counts and equal ones, checked at its limits.

For anyone who compares methods. FedAvg weights a client by its n samples, so it outvotes small clients; equal weights
trust the smallest client as much as the largest. This method uses n to a power. Expect exactly FedAvg with power 1,
exactly equal weights with power 0, and something between them with power 0.5. On the demo's five sites, of which a
small one has its scanner turned, equal weights are best. Averages over three seeds.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

import comfedl as cf
from comfedl.algorithms.context import Participation, RoundContext
from comfedl.data.demo_sites import demo_sites


@dataclass(frozen=True)
class PowerAvg(cf.FedAvg):
    """FedAvg with weights n_i ** power."""

    power: float = 0.5

    name: ClassVar[str] = "power-avg"
    paper: ClassVar[str] = "an example"
    goal: ClassVar[str] = "min_w sum_i n_i^power f_i(w) / sum_i n_i^power"

    def round(self, state: dict, context: RoundContext) -> tuple[dict, Participation]:
        replies = context.ask("train", context.sample(), {"model": state["model"]})
        weights = self.shares(torch.from_numpy(context.sizes[replies.clients]))
        return self.advance(state, replies, weights), Participation(replies.clients, weights)

    def combined(self, values: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        return (self.shares(sizes) * values).sum()  # the objective in the records

    def shares(self, sizes: torch.Tensor) -> torch.Tensor:
        powers = sizes.double() ** self.power
        return powers / powers.sum()


def main() -> None:
    def run(method: cf.FedAvg, seed: int, rounds: int = 80) -> cf.Result:
        model = cf.models.build("logistic", (1, 8, 8), classes=10, seed=seed)
        return cf.fit(model, demo_sites(seed), method, rounds=rounds, seed=seed, eval_every=rounds)

    for power, weighting in ((1.0, "samples"), (0.0, "uniform")):
        mine, known = (run(method, 0, 3).params for method in (PowerAvg(power=power), cf.FedAvg(weighting=weighting)))
        same = all(torch.equal(mine[name], known[name]) for name in known)
        print(f"power {power}: {'the same bits as' if same else 'NOT the same as'} FedAvg with weighting {weighting!r}")
    for power in (1.0, 0.5, 0.0):
        rows = [run(PowerAvg(power=power), seed).rounds[-1] for seed in range(3)]
        mean, worst = (np.mean([row[f"validation.accuracy.{of}"] for row in rows]) for of in ("mean", "worst"))
        print(f"power {power}: worst site {worst:.3f}, mean {mean:.3f}")


if __name__ == "__main__":
    main()
