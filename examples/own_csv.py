"""Your own CSV file: train, evaluate and predict with three commands and one config.

For anyone with a table that has one row per sample and a column that says where the row comes from. The table is
scikit-learn's diabetes study: 442 patients and how far the disease had progressed after a year. Three age groups
stand in for three clinics. Expect an RMSE of about 0.7 standard deviations at each clinic, and predictions for three
new patients in the units of the table.
"""

import csv
import subprocess
import sys
import tempfile
from pathlib import Path

from sklearn.datasets import load_diabetes

CONFIG = """
rounds = 60
eval_every = 10
loss = "mse"
save_personal = false           # a model for each clinic is another example

[data]
name = "csv"
path = "patients.csv"
client = "clinic"
target = "progression"
scale_target = true             # the labels go from 25 to 346: train on them with mean 0 and deviation 1

[model]
name = "logistic"               # one linear layer: with loss = "mse" a linear regression

[algorithm]
name = "robust"
gamma = 0.1
lr = 0.05
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder))
        for command in (
            "comfedl run robust.toml",
            "comfedl evaluate runs/robust",
            "comfedl predict runs/robust new.csv",
        ):
            print("$", command, flush=True)
            words = [sys.executable, "-m", *command.split()]
            said = subprocess.run(words, cwd=folder, check=True, capture_output=True, text=True).stdout
            print(said if "evaluate" in command else said.splitlines()[-1], flush=True)
        print(Path(folder, "predictions.csv").read_text())


def write_files(folder: Path) -> None:
    """A table with a column for the clinic, three new patients without a label, and the config."""
    x, y = load_diabetes(return_X_y=True, scaled=False)
    names = ["age", "sex", "bmi", "pressure", *(f"serum{k}" for k in range(1, 7))]
    clinics = ["under 40" if age < 40 else "40 to 60" if age < 60 else "over 60" for age in x[:, 0]]
    rows = [[*row, clinic, label] for row, clinic, label in zip(x.tolist(), clinics, y.tolist(), strict=True)]
    for name, header, found in (("patients", [*names, "clinic", "progression"], rows[3:]), ("new", names, rows[:3])):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([header, *(row[: len(header)] for row in found)])
    (folder / "robust.toml").write_text(CONFIG)


if __name__ == "__main__":
    main()
