"""torchrun: the same script in two processes, with the same results as in one.

For anyone whose simulation has outgrown one process. Every process makes the same call with engine="distributed",
trains its share of the clients, and gets the same result. Run with `python`, this script starts itself under torchrun:

    torchrun --standalone --nproc-per-node 2 examples/two_processes.py

Expect the results of one process, up to rounding. A model as small as this one does not train faster.
"""

import os
import subprocess
import sys

import comfedl as cf


def train(engine: str) -> cf.Result:
    fed = cf.load("digits", cf.partition.Dirichlet(clients=6, alpha=0.3), seed=0)
    model = cf.models.build("mlp", (1, 8, 8), classes=10, seed=0)
    return cf.fit(model.double(), fed, cf.Robust(gamma=0.1, lr=0.1), rounds=20, eval_every=20, engine=engine)


def main() -> None:
    if "RANK" not in os.environ:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        sys.exit(subprocess.run([*torchrun, __file__]).returncode)
    both = train("distributed")
    if os.environ["RANK"] != "0":
        return
    alone = train("embedded")
    for name, result in (("two processes", both), ("one process", alone)):
        print(f"{name:13} worst client's validation accuracy {result.rounds[-1]['validation.accuracy.worst']:.4f}")
    apart = max((both.params[name] - alone.params[name]).abs().max().item() for name in alone.params)
    print("largest difference of a parameter:", "below 1e-12" if apart < 1e-12 else f"{apart:.1e}")


if __name__ == "__main__":
    main()
