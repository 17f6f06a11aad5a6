"""LoRA on real text: is a speech of Shakespeare's in verse or in prose? Only the adapters travel.

For anyone who adapts a transformer over sites. The server has the histories and tragedies and trains a small BERT on
them; the clients are thirteen comedies. In the base's plays one speech in seven is prose, in "The Merry Wives of
Windsor" four in five. Expect about one accuracy for every method, with intervals that overlap: prose is outvoted in few
plays, and the adapters can learn little more. Each play's own adapters (Ditto) may help. Adapters take a seventieth of
the traffic. One seed; neither model nor learning rate was tuned for a method. Downloads 5 MB once; needs the extra
`adapters`.
"""

from __future__ import annotations

import copy
import tempfile
import warnings

import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification

import comfedl as cf

COMEDIES = [
    *("alls-well-that-ends-well", "as-you-like-it", "comedy-of-errors", "loves-labours-lost", "measure-for-measure"),
    *("merchant-of-venice", "merry-wives-of-windsor", "much-ado-about-nothing", "taming-of-the-shrew", "tempest"),
    *("twelfth-night", "two-gentlemen-of-verona", "winters-tale"),
]
SERVER = {"server_optimizer": cf.optim.SGD(momentum=0.9), "server_average": 0.9}  # as Robust has it
METHODS = {
    "FedAvg, whole model": cf.FedAvg(lr=0.1),
    "FedAvg": cf.FedAvg(lr=0.1),
    "equal weights": cf.FedAvg(lr=0.1, weighting="uniform", **SERVER),
    "Robust": cf.Robust(gamma=0.1, lr=0.1),
    "Ditto": cf.Ditto(lr=0.1),
}


def inputs(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": x, "attention_mask": (x > 0).long()}


def base(x: torch.Tensor, y: torch.Tensor) -> torch.nn.Module:
    """BERT from a config, trained at the server."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = BertConfig(vocab_size=4000, max_position_embeddings=32, initializer_range=0.1, num_labels=2, **sizes)
    central = cf.FedAvg(lr=0.003, local_steps=100, client_optimizer=cf.optim.Adam(keep_state=True))
    data = cf.FederatedData({"server": (inputs(x), y)})
    return cf.fit(BertForSequenceClassification(config), data, central, rounds=4, eval_every=4).to_module()


def adapted(model: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(1)
    return get_peft_model(copy.deepcopy(model), LoraConfig("SEQ_CLS", r=8, target_modules=["query", "value"]))


def main() -> None:
    warnings.simplefilter("ignore")  # of peft
    plays = cf.load("shakespeare")
    public = [plays.train[name] for name in plays.names if name not in COMEDIES]
    model = base(*map(torch.cat, zip(*public, strict=True)))
    train, test = ({n: (inputs(s[n][0]), s[n][1]) for n in COMEDIES} for s in (plays.train, plays.test))
    for name, method in METHODS.items():
        start = model.requires_grad_(True) if "whole" in name else adapted(model)
        with tempfile.TemporaryDirectory() as out:  # its folder has the adapters alone
            fed = cf.FederatedData(train, test=test)
            result = cf.fit(start, fed, method, rounds=20, eval_every=20, out=out + "/run", save_frozen=False)
        key = "personal_accuracy" if name == "Ditto" else "accuracy"
        worst = min(result.clients_table("test"), key=lambda row: row[key])
        print(
            f"{name:19} mean {result.rounds[-1][f'test.{key}.mean']:.3f}, worst {worst[key]:.3f}",
            f"({worst[key + '_low']:.2f} to {worst[key + '_high']:.2f}, {worst['client']}),",
            f"{(result.traffic['up_bytes'] + result.traffic['down_bytes']) / 1e6:.1f} MB",
        )


if __name__ == "__main__":
    main()
