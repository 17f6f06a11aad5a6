"""A real network on your own machine: Flower's SuperLink and three SuperNodes, with TLS and a key for each site.

For anyone whose data must stay where they are, before setting up servers. The config is the same as for `comfedl
run`; each client becomes a site that has only its own data. Needs Flower: pip install 'comfedl[flower]'. Expect one
to three minutes, most of it Flower's start-up and waiting, and the results of a simulation, up to rounding.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

CONFIG = """
rounds = 3
save_personal = false

[data]
name = "digits"
partition = "dirichlet"
clients = 3
alpha = 0.3

[model]
name = "logistic"

[algorithm]
name = "robust"
gamma = 0.1
lr = 0.1
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "study.toml").write_text(CONFIG)
        for command in ("comfedl flower local study.toml --out sites", "comfedl run study.toml --out simulated"):
            print("$", command, flush=True)
            subprocess.run([sys.executable, "-m", *command.split()], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        for name in ("sites", "simulated"):
            last = json.loads((Path(folder) / name / "rounds.jsonl").read_text().splitlines()[-1])
            mean, worst = (last[f"validation.accuracy.{of}"] for of in ("mean", "worst"))
            print(f"{name:9} round {last['round']}: validation accuracy: mean {mean:.4f}, worst site {worst:.4f}")


if __name__ == "__main__":
    main()
