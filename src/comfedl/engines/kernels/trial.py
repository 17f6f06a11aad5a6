"""A short trial of vmap against one client after another, for models that no rule covers.

The two agree to rounding only, so the outcome is remembered: the same run on the same machine takes the same way again.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from comfedl.core.objectives import Batch, Learner, Model, Params
from comfedl.data.download import cache_dir
from comfedl.data.federated import FederatedData
from comfedl.engines.kernels.stacked import Vmapped
from comfedl.engines.replies import stacked, unstacked
from comfedl.utils import tree

CLIENTS, SAMPLES, REPEATS = 8, 32, 3
# vmap must be this much faster: near a tie the way that is always possible is taken.
MARGIN = 1.3


def vmap_is_faster(learner: Learner, data: FederatedData, size: int | None) -> tuple[bool, str]:
    """Whether many clients' gradients on batches of ``size`` are faster, and as right, by vmap; and why."""
    file = cache_dir() / "trials.json"
    known = _read(file)
    key = _key(learner, data, size)
    if key not in known:
        with torch.random.fork_rng(devices=[]):
            known[key] = _trial(learner, data, min(size or SAMPLES, SAMPLES))
        _write(file, known)
    faster, why = known[key]
    return bool(faster), str(why)


def _trial(learner: Learner, data: FederatedData, size: int) -> tuple[bool, str]:
    clients = np.arange(min(CLIENTS, len(data.names)))
    if len(clients) < 2:
        return False, "there is only one client"
    train = data.train
    rows = [train.offsets[i] + np.arange(size) % train.sizes[i] for i in clients]
    x, y = train.at(np.stack(rows))
    module = learner.module
    assert module is not None
    model = Model(
        params={name: part.detach() for name, part in module.named_parameters() if part.requires_grad},
        buffers={name: part.detach().clone() for name, part in module.named_buffers()},
    )
    many = Vmapped(learner)

    def mapped() -> list[Params]:
        return unstacked(_gradient(many, stacked([model] * len(clients)), (x, y)), len(clients))

    def serial() -> list[Params]:
        return [_gradient(learner, model, (x[k], y[k])) for k in range(len(clients))]

    try:
        both = mapped(), serial()
    except Exception as error:  # whatever a reader's module raises under vmap, it runs serially
        return False, f"vmap cannot run it ({str(error).splitlines()[0][:100] if str(error) else type(error).__name__})"
    pairs = zip(tree.leaves(both[0]), tree.leaves(both[1]), strict=True)
    if not all(torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True) for a, b in pairs):
        return False, "vmap gives other numbers"
    times = [(_seconds(mapped), _seconds(serial)) for _ in range(REPEATS)]
    ratio = min(alone for _, alone in times) / min(together for together, _ in times)
    return ratio > MARGIN, f"a trial found vmap {ratio:.1f} times as fast as one client after another"


def _gradient(learner: Learner, model: Model, batch: Batch) -> Params:
    value, pullback, _ = learner.pull_loss(model["params"], model["buffers"], batch)
    return pullback(torch.ones_like(value))


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _key(learner: Learner, data: FederatedData, size: int | None) -> str:
    """What the outcome may depend on."""
    module = learner.module
    assert module is not None
    kinds = [f"{type(layer).__module__}.{type(layer).__qualname__}" for layer in module.modules()]
    shapes = [(name, tuple(part.shape), str(part.dtype)) for name, part in module.state_dict().items()]
    sample = (tuple(data.train.x.shape[1:]), str(data.train.x.dtype), str(data.train.x.device), size)
    machine = (platform.node(), platform.processor(), torch.__version__, min(CLIENTS, len(data.names)))
    text = repr((repr(module), kinds, shapes, sample, machine, getattr(learner.loss_function, "__name__", "")))
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _read(file: Path) -> dict[str, tuple[bool, str]]:
    try:
        found = json.loads(file.read_text())
        return {str(key): (bool(faster), str(why)) for key, (faster, why) in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write(file: Path, known: dict[str, tuple[bool, str]]) -> None:
    """Remember the trials; where that cannot be written, the next run has its own."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(known, indent=1))
        scratch.replace(file)
    except OSError:
        pass
