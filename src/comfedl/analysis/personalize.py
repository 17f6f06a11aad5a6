"""Adapt a trained model to a client that took no part in training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from comfedl.algorithms.base import descend
from comfedl.analysis.load_run import SavedRun
from comfedl.analysis.own_data import note_known
from comfedl.analysis.saved_model import load_learner, model_errors, read_labelled
from comfedl.core.learner import Model
from comfedl.core.objectives import LocalLoss
from comfedl.data.from_tables import Shares
from comfedl.training.personal_models import model_bytes
from comfedl.utils import checks, rng, samples
from comfedl.utils.errors import DataError
from comfedl.utils.files import write_atomic


@dataclass(frozen=True)
class Personalized:
    """The adapted model, and the scores before and after on samples held out from adapting."""

    model: Model
    before: dict[str, float]
    after: dict[str, float]
    adapted_on: int
    held_out: int
    lr: float
    steps: int


def personalize(
    run: SavedRun,
    data: Path,
    out: Path,
    steps: int | None = None,
    lr: float | None = None,
    held_out: float = 0.3,
    seed: int = 0,
) -> Personalized:
    """Adapt the global model to a new client's samples and write the model.

    The share ``held_out`` of the samples is used only for scoring. ``steps`` and ``lr`` default to those of the run's
    method for personal models.
    """
    checks.between("held_out", held_out, 0, 1)
    checks.positive("held_out", held_out)
    checks.at_least("seed", seed, 0)
    algorithm = run.settings.make_algorithm()
    default_lr, default_steps = algorithm.adaptation
    lr, steps = default_lr if lr is None else lr, default_steps if steps is None else steps
    checks.positive("lr", lr)
    checks.at_least("steps", steps, 1)
    learner, to_state = load_learner(run)
    x, y, _ = read_labelled(run, data)
    note_known(run, data, x, y)
    labels = torch.zeros(len(y), dtype=torch.int64) if y.is_floating_point() or y.ndim > 1 else y
    parts = Shares(held_out, 0.0, seed).split_rows(data.stem, labels.numpy())
    if not len(parts["validation"]):
        raise DataError(f"{data} has {len(y)} row{'s' if len(y) > 1 else ''}, too few to hold some out; give more.")
    chosen = (torch.from_numpy(parts[name]) for name in ("train", "validation"))
    train, held = ((samples.select(x, rows), y[rows]) for rows in chosen)
    start = to_state(run.tensors)
    batches = [train] * steps
    if algorithm.batch_size is not None and algorithm.batch_size < len(train[1]):
        rows = rng.subsets([rng.key(seed, "personalise")], [len(train[1])], steps, algorithm.batch_size)[0]
        batches = [(samples.select(train[0], row), train[1][row]) for row in torch.from_numpy(rows)]
    frozen = {name for name, part in run.module.named_parameters() if not part.requires_grad}
    trainable = {name: part for name, part in start["params"].items() if name not in frozen}
    with model_errors(data):
        state = Model(params=trainable, buffers=start["buffers"])
        adapted = descend(LocalLoss(learner), state, batches, batches, lr).model
        model = Model(params={**start["params"], **adapted["params"]}, buffers=adapted["buffers"])
        before, after = (
            {key: float(score) for key, score in learner.scores(each, held).items()} for each in (start, model)
        )
    if not all(part.isfinite().all() for part in model["params"].values()):
        raise DataError(f"Adapting with lr = {lr:g} diverged (NaN or infinity); give a smaller --lr.")
    write_atomic(out, model_bytes(model))
    return Personalized(model, before, after, len(train[1]), len(held[1]), lr, steps)
