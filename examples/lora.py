"""LoRA on real text: is a speech of Shakespeare's in verse or in prose? Only the adapters travel.

For anyone who adapts a transformer over sites. The server trains a small BERT on the histories and tragedies; the
clients are thirteen comedies, from one speech in eleven in prose to four in five. Expect Robust to gain nothing over
FedAvg: the worst play is not outvoted, its speeches are hard to tell apart, and all intervals overlap. Expect adapters
of each play's own (Ditto) to help on average, and a 65th of the traffic. One seed; no learning rate was tuned. Takes
about two minutes, downloads 5 MB once, and needs the extra `adapters`.
"""

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
