"""The files of ``comfedl init``: a small project with its own config, model and data."""

from __future__ import annotations

from pathlib import Path

from comfedl.utils.errors import RunFolderError
from comfedl.utils.files import write_atomic

CONFIG = """\
rounds = 60
eval_every = 5
loss = "bce"                          # two classes; also cross_entropy, mse, mae, huber

[data]
name = "my_data:hospitals"            # the function hospitals(seed, ...) in my_data.py
validation = 0.2
test = 0.2

[model]
name = "my_model:make"                # the function make(shape, outputs, ...) in my_model.py
hidden = 16

[algorithm]
name = "comfedl"
lr = 0.1
local_steps = 5
batch_size = 32
outer = { name = "kl", gamma = 0.2 }  # comfedl advise config.toml shows the effect of gamma
"""

MODEL = '''\
"""The model, built from the shape of one sample and the number of outputs; options come from [model] in the config."""

import math

from torch import nn


def make(shape, outputs, hidden=16):
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), hidden), nn.ReLU(), nn.Linear(hidden, outputs))
'''

DATA = '''\
"""The data. Replace this example with your own; options come from [data] in the config.

The example splits scikit-learn's breast-cancer data over four hospitals with different patients.
"""

import numpy as np
from sklearn.datasets import load_breast_cancer

import comfedl as cf


def hospitals(seed, validation=0.2, test=0.2):
    raw = load_breast_cancer()
    table = {name.replace(" ", "_"): raw.data[:, i] for i, name in enumerate(raw.feature_names)}
    table["diagnosis"] = raw.target_names[raw.target]
    texture = table["mean_texture"]
    table["hospital"] = np.array(["city", "lake", "hill", "coast"])[
        np.digitize(texture, np.quantile(texture, [0.5, 0.8, 0.95]))
    ]
    # From a file: cf.FederatedData.from_dataframe(pandas.read_csv("patients.csv"), client="hospital", ...)
    return cf.FederatedData.from_dataframe(
        table, client="hospital", target="diagnosis", validation=validation, test=test, seed=seed
    )
'''

README = """\
# A federated project

    comfedl data describe config.toml    # what each client holds
    comfedl advise config.toml           # how each gamma would weight the clients
    comfedl run config.toml              # train; writes runs/config
    comfedl evaluate runs/config         # test scores per client
    comfedl predict runs/config new.csv --client city

`my_data.py` loads the data, `my_model.py` builds the model, `config.toml` configures the training.
"""

FILES = {"config.toml": CONFIG, "my_model.py": MODEL, "my_data.py": DATA, "README.md": README}


def write_project(folder: Path) -> None:
    """Write the project's files into a folder; on failure, nothing is left behind."""
    existing = [name for name in FILES if (folder / name).exists()]
    if existing:
        raise RunFolderError(f"{folder} already has {', '.join(existing)}; give another folder.")
    written: list[Path] = []
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in FILES.items():
            write_atomic(folder / name, text.encode())
            written.append(folder / name)
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        for path in created:
            if path.is_dir():
                path.rmdir()
        raise RunFolderError(f"{folder} cannot be written ({error.strerror}); give another folder.") from error
