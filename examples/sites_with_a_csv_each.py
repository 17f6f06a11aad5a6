"""Sites with a CSV each: one encoding for all of them, made of counts and means, over a real network on this machine.

For anyone whose sites have tables that must not be joined. The sites send counts, means and variances of their columns;
the run then predicts new rows like any other. The files here are written differently. Needs Flower: pip install
'comfedl[flower]'. Expect one to three minutes, most of it Flower's start-up, and the probabilities of the joined table.
"""

import csv
import random
import subprocess
import sys
import tempfile
from pathlib import Path

TRAINING = """
rounds = 3
save_personal = false
{data}
[algorithm]
name = "robust"
gamma = 0.1
"""
AT_SITES = TRAINING.format(
    data="""
[data]
name = "sites"
target = "ill"
classes = ["no", "yes"]
min_count = 5  # sites report nothing about fewer rows
columns = { age = [0, 120], ward = ["surgery", "medicine"], smoker = "flag" }
"""
)
JOINED = TRAINING.format(data='[data]\nname = "csv"\npath = "joined.csv"\nclient = "hospital"\ntarget = "ill"\n')
SETTINGS = 'decimal = ","\nrename = { alter = "age", krank = "ill" }\n'


def patients(count: int, age: float) -> list[list[str]]:
    draw, rows = random.Random(count), []
    for _ in range(count):
        years, ward = draw.gauss(age, 12), draw.choice(["surgery", "medicine"])
        ill = draw.random() < 1 / (1 + 2.7 ** ((55 - years) / 6))
        rows.append([f"{min(max(years, 0), 120):.1f}", ward, draw.choice(["true", "false"]), "yes" if ill else "no"])
    return rows


def write(path: Path, header: str, rows: list[list[str]], delimiter: str = ",") -> None:
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([header.split(","), *rows])


def main() -> None:
    tables = {"north": patients(120, 50), "south": patients(80, 58), "west": patients(50, 65)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "data").mkdir()
        write(folder / "data" / "north.csv", "age,ward,smoker,ill", tables["north"])
        write(folder / "data" / "west.csv", "age,ward,smoker,ill", tables["west"])
        south = [[row[0].replace(".", ","), *row[1:]] for row in tables["south"]]
        write(folder / "data" / "south.csv", "alter,ward,smoker,krank", south, ";")
        (folder / "data" / "south.toml").write_text(SETTINGS)
        joined = [[site, *row] for site, rows in tables.items() for row in rows]
        write(folder / "joined.csv", "hospital,age,ward,smoker,ill", joined)
        write(folder / "new.csv", "age,ward,smoker", [["43", "surgery", "true"], ["71", "medicine", "false"]])
        (folder / "sites.toml").write_text(AT_SITES)
        (folder / "joined.toml").write_text(JOINED)
        for command in ("flower local sites.toml --tables data --out sites", "run joined.toml --out joined"):
            run = command.split()[-1]
            for words in (command, f"predict {run} new.csv --out new-{run}.csv"):
                print("$ comfedl", words, flush=True)
                subprocess.run([sys.executable, "-m", "comfedl", *words.split()], cwd=folder, check=True, stdout=-3)
            print((folder / f"new-{run}.csv").read_text(), end="")


if __name__ == "__main__":
    main()
