"""Figures 2 and 3 in small: digits, two methods, three rounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from comfedl_reproduction import experiments

FIG2 = """
title = "a small figure 2"
data = "digits"
metric = "accuracy"
choose_by = "validation.accuracy.worst"

[quick]
seeds = 2
tuning_seeds = 1
tuning = { eval_every = 1 }

[base]
rounds = 3
[base.data]
name = "digits"
partition = "imbalanced"
clients = 4
large = 100
small = 20
[base.model]
name = "logistic"
[base.algorithm]
local_steps = 2
batch_size = 10

[groups.published]
title = "as published"
methods = ["comfedl", "literal"]
published = {}

[groups.independent]
title = "tuned"
methods = ["comfedl", "fedavg"]

[methods.comfedl]
label = "ComFedL"
algorithm = { name = "comfedl", outer = { name = "kl", gamma = 0.2 } }
published = { lr = 0.01 }
grid = { lr = [0.5, 0.001], "outer.gamma" = [0.5] }

[methods.fedavg]
label = "FedAvg"
algorithm = { name = "fedavg" }
published = { lr = 0.01 }
candidates = [{ lr = 0.001 }, { lr = 0.5 }]

[methods.literal]
label = "ComFedL, literal exponent"
algorithm = { name = "comfedl", outer = { name = "exp", gamma = 0.02 } }
published = { lr = 0.01 }
"""
FIG3 = """
title = "a small figure 3"
data = "digits"
metric = "accuracy"
choose_by = "validation.accuracy.worst"

[quick]
seeds = 1

[groups.tau-independent]
title = "over tau"
methods = ["comfedl"]
points = [
    { label = "1", set = { rounds = 6, algorithm = { local_steps = 1 } } },
    { label = "2", set = {} },
]

[methods.comfedl]
label = "ComFedL"
like = "fig2/independent/comfedl"
"""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of small experiments, which takes the place of the real one."""
    folder = tmp_path / "experiments"
    folder.mkdir()
    (folder / "fig2.toml").write_text(FIG2)
    (folder / "fig3.toml").write_text(FIG3)
    monkeypatch.setattr(experiments, "folder", lambda: folder)
    return folder
