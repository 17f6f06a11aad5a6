"""A real network on your own machine: Flower's SuperLink and three SuperNodes, with TLS and a key for each site.

For anyone whose data must stay where they are, before the servers are set up. The config is that of `comfedl run`;
each of its clients becomes a site with its own data alone. Needs the extra: pip install 'comfedl[flower]'. Expect one
to three minutes, nearly all of them Flower's start-up and waiting, and the numbers of a simulation to rounding.
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
