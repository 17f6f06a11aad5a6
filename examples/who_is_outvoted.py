"""Who is outvoted? A large loss alone does not say: one site here needs more weight, another would waste it.

For anyone who wonders whether robust weights will help. Train with equal weights, let each client continue alone from
there, and compare its two losses on held-out data: if its own fit is much better, the average has outvoted it. The
turned site has its scanner on its side; at the noisy site two labels in five are random. Expect both to be badly
served, but only the turned site to be outvoted. `comfedl advise CONFIG` does the same and also compares values of
gamma.
"""

import numpy as np
from sklearn.datasets import load_digits

import comfedl as cf

SIZES = {"city": 300, "town": 200, "port": 150, "turned": 100, "noisy": 100}


def sites(seed: int) -> cf.FederatedData:
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).reshape(-1, 1, 8, 8).astype(np.float32)
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(labels))
    parts = {"train": {}, "validation": {}}
    for site, size in SIZES.items():
        for split, count in (("train", size), ("validation", 150)):
            rows, order = order[:count], order[count:]
            x = np.rot90(images[rows], axes=(2, 3)) if site == "turned" else images[rows]
            guessed = generator.random(count) < (0.4 if site == "noisy" else 0)
            y = np.where(guessed, generator.integers(0, 10, count), labels[rows])
            parts[split][site] = (x.copy(), y)
    return cf.FederatedData(**parts)


def main() -> None:
    model = cf.models.build("logistic", (1, 8, 8), classes=10, seed=0)
    method = cf.ComFedL(lr=0.1, personal_steps=50)  # equal weights; a personal model is a client's own fit
    result = cf.fit(model, sites(seed=0), method, rounds=20, eval_every=20)
    last = [row for row in result.clients if row["round"] == 20]
    mean = np.mean([row["validation.loss"] for row in last])
    for row in sorted(last, key=lambda row: -row["validation.loss"]):
        averaged, own = row["validation.loss"], row["validation.personal_loss"]
        outvoted = averaged > mean and own < 0.8 * averaged
        print(f"{row['client']:6} averaged model {averaged:.2f}, own fit {own:.2f}{'  outvoted' if outvoted else ''}")


if __name__ == "__main__":
    main()
