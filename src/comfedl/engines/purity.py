"""Whether a client's step leaves anything behind besides its results: if not, clients may run on several threads.

A module of the user's own may draw random numbers or keep state from one batch to the next, which its code does not
show. So one client's step is run once beforehand, and its results are dropped.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from comfedl.core.learner import Learner


def trace(learner: Learner, run: Callable[[Learner], object]) -> str | None:
    """What keeps a step from running on several threads; None if nothing does. Runs it with a copy of the learner."""
    learner = learner.copy()
    assert learner.module is not None
    generators, attributes = generator_states(), _attributes(learner.module)
    with _restored():
        try:
            run(learner)
        except Exception:  # the actual run tells what is wrong
            return "it fails"
        if generator_states() != generators:
            return "it draws random numbers"
    if _changed(attributes, _attributes(learner.module)):
        return "the model keeps state from one batch to the next"
    if learner.switched_kernels:
        return "second derivatives of attention switch torch's kernels for the whole process"
    return None


def generator_states() -> tuple[object, ...]:
    """The states of the global random generators of torch, Python and NumPy."""
    return torch.default_generator.get_state().numpy().tobytes(), random.getstate(), pickle.dumps(np.random.get_state())


@contextmanager
def _restored() -> Iterator[None]:
    """Put the global random generators back afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _attributes(module: nn.Module) -> dict[tuple[str, str], tuple[object, object]]:
    """The attributes of a module's layers, with what changes if one is changed in place.

    It holds the values themselves, since a new object may get the address of one that is gone.
    """
    own = {"training", "_parameters", "_buffers", "_modules"}
    return {
        (place, name): (value, _contents(value))
        for place, layer in module.named_modules()
        for name, value in vars(layer).items()
        if name not in own
    }


def _contents(value: object) -> object:
    """What changes if a value is changed in place: a tensor's version, an array's bytes, a container's contents."""
    if isinstance(value, Tensor):
        return value._version
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        return [(key, id(each), _contents(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return [(id(each), _contents(each)) for each in value]
    return len(value) if isinstance(value, set) else None


def _changed(
    before: dict[tuple[str, str], tuple[object, object]], after: dict[tuple[str, str], tuple[object, object]]
) -> bool:
    if before.keys() != after.keys():
        return True
    return any(before[key][0] is not value or before[key][1] != contents for key, (value, contents) in after.items())
