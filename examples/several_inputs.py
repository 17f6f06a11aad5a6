"""A model with several inputs: words of a note, their mask and two measurements, by name from the data to predictions.

For anyone whose model takes more than one tensor: x is a dict, and the model is called with its keys. The made-up notes
of three hospitals are of different lengths, so they are padded and have a mask. Expect an accuracy of 0.8 to 0.9 at
each, and from the saved run exactly the outputs that the trained model gives.
"""

from __future__ import annotations

import tempfile

import torch
from torch import Tensor, nn

import comfedl as cf


class Triage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(50, 8), nn.Linear(10, 2)

    def forward(self, ids: Tensor, mask: Tensor, vitals: Tensor) -> dict[str, Tensor]:
        weight = mask[:, :, None].float()
        mean = (self.words(ids) * weight).sum(dim=1) / weight.sum(dim=1)
        return {"logits": self.out(torch.cat([mean, vitals], dim=1))}


def hospital(n: int, shift: float, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    source = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 50, (n, 12), generator=source)
    mask = torch.arange(12) < torch.randint(3, 13, (n, 1), generator=source)
    vitals = torch.randn(n, 2, generator=source) + shift
    urgent = (vitals[:, 0] + 4 * ((ids > 25) & mask).sum(dim=1) / mask.sum(dim=1) > 2 + shift).long()
    return {"ids": ids * mask, "mask": mask, "vitals": vitals}, urgent


def main() -> None:
    sizes = {"north": (300, 0.0), "south": (60, 1.0), "islands": (40, -1.0)}
    train = {name: hospital(n, shift, seed) for seed, (name, (n, shift)) in enumerate(sizes.items())}
    test = {name: hospital(200, shift, 10 + seed) for seed, (name, (_, shift)) in enumerate(sizes.items())}
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        fed = cf.FederatedData(train, test=test)
        result = cf.fit(Triage(), fed, cf.Robust(gamma=0.1, lr=0.3), rounds=150, eval_every=150, out=folder + "/run")
        for row in result.clients_table("test"):
            print(f"{row['client']:8} accuracy {row['accuracy']:.2f}, {row['train_samples']} notes to train on")
        x, _ = test["south"]
        saved = cf.load_run(folder + "/run", model=Triage()).predict(x)["logits"]
        with torch.no_grad():
            same = torch.equal(saved, result.to_module()(**x)["logits"])
        print(f"the saved run predicts the same: {same}")


if __name__ == "__main__":
    main()
