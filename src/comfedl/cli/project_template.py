"""A small project to start from: a config, a model and data of one's own, that run as they are."""

from __future__ import annotations

from pathlib import Path

from comfedl.utils.errors import RunFolderError
from comfedl.utils.files import write_atomic

CONFIG = """\
rounds = 60
eval_every = 5
loss = "bce"                          # two classes; also cross_entropy, mse, mae, huber

[data]
name = "my_data:hospitals"            # the function hospitals(seed, ...) of my_data.py
validation = 0.2
test = 0.2

[model]
name = "my_model:make"                # the function make(shape, outputs, ...) of my_model.py
hidden = 16

[algorithm]
name = "comfedl"
lr = 0.1
local_steps = 5
batch_size = 32
outer = { name = "kl", gamma = 0.2 }  # comfedl advise config.toml shows what each gamma does
"""

MODEL = '''\
"""The model. It gets one sample's shape and the number of outputs; its options stand in the config's [model]."""

import math

from torch import nn


def make(shape, outputs, hidden=16):
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), hidden), nn.ReLU(), nn.Linear(hidden, outputs))
'''

DATA = '''\
"""The data. Put your own in place of this example; the options stand in the config's [data].

The example is scikit-learn's breast-cancer data, as if four hospitals saw patients of different kinds.
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
    # With a file: cf.FederatedData.from_dataframe(pandas.read_csv("patients.csv"), client="hospital", ...)
    return cf.FederatedData.from_dataframe(
        table, client="hospital", target="diagnosis", validation=validation, test=test, seed=seed
    )
'''

README = """\
# A federated project

    comfedl data describe config.toml    # what each client holds
    comfedl advise config.toml           # what each gamma would do to the clients' weights
    comfedl run config.toml              # train; writes runs/config
    comfedl evaluate runs/config         # each client's scores on its test rows
    comfedl predict runs/config new.csv --client city

`my_data.py` makes the data, `my_model.py` the model, `config.toml` says how to train.
"""

FILES = {"config.toml": CONFIG, "my_model.py": MODEL, "my_data.py": DATA, "README.md": README}


def write_project(folder: Path) -> None:
    """Write the files of a project into a folder that has none of them yet."""
    there = [name for name in FILES if (folder / name).exists()]
    if there:
        raise RunFolderError(f"{folder} already has {', '.join(there)}; give another folder.")
    written: list[Path] = []
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in FILES.items():
            write_atomic(folder / name, text.encode())
            written.append(folder / name)
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        for path in made:
            if path.is_dir():
                path.rmdir()
        raise RunFolderError(f"{folder} cannot be written ({error.strerror}); give another folder.") from error
