"""Two of ten clients attack: what is left of the model, with and without a defence.

For anyone who does not control all clients. The attackers report a loss of a million, which gives them nearly all of
the robust weight, and reverse their updates. defence="strong" bounds weight, length and direction at once. Expect the
attack to destroy the model without a defence and to cost a few points with it. Test accuracy of the eight honest
clients, averaged over three seeds.
"""

import warnings

import numpy as np

import comfedl as cf

BAD = ["client-3", "client-7"]
ATTACK = [cf.faults.LossLie(BAD, value=1e6), cf.faults.SignFlip(BAD)]


def main() -> None:
    warnings.filterwarnings("ignore", message="The weights jump")  # which they do under attack
    for defence in (None, "strong"):
        for faults in ([], ATTACK):
            worst, mean = [], []
            for seed in range(3):
                fed = cf.load("digits", cf.partition.Dirichlet(clients=10, alpha=1.0), seed=seed)
                model = cf.models.build("logistic", (1, 8, 8), classes=10, seed=seed)
                method = cf.Robust(gamma=0.1, lr=0.1, defence=defence)
                rows = cf.fit(model, fed, method, rounds=60, seed=seed, eval_every=60, faults=faults).clients
                honest = [row["test.accuracy"] for row in rows if row["round"] == 60 and row["client"] not in BAD]
                worst.append(min(honest))
                mean.append(np.mean(honest))
            print(
                f"{defence or 'no':6} defence, {'two attackers' if faults else 'no attack':13}: "
                f"worst honest client {np.mean(worst):.3f}, mean {np.mean(mean):.3f}"
            )


if __name__ == "__main__":
    main()
