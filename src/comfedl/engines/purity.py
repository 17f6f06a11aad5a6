"""Whether a client's step leaves anything behind besides its results: if not, clients may run on several threads.

A module of the user's own may draw random numbers or keep state from one batch to the next, which its code does not
show. So one client's step is run once beforehand, and its results are dropped.
"""

from __future__ import annotations

import logging
import random
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from comfedl.core.learner import Learner
from comfedl.utils import generators

DEPTH = 32  # of objects within objects


def trace(learner: Learner, run: Callable[[Learner], object]) -> str | None:
    """What keeps a step from running on several threads; None if nothing does. Runs it with a copy of the learner."""
    learner = learner.copy()
    before = _Contents(learner)
    if before.unknown is not None:
        return f"whether a {before.unknown.__name__} in the model keeps state cannot be seen"
    with generators.restored() as states:
        try:
            run(learner)
        except Exception:  # the actual run tells what is wrong
            return "it fails"
        if generators.states() != states:
            return "it draws random numbers"
    after = _Contents(learner)
    if after.unknown is not None or after.marks != before.marks:
        return "the model keeps state from one batch to the next"
    if learner.switched_kernels:
        return "second derivatives of attention switch torch's kernels for the whole process"
    return None


# What cannot change, or is compared by its value.
VALUES = (types.NoneType, bool, int, float, complex, str, bytes, range, slice, torch.dtype, torch.device, torch.Size)
# What is compared by its identity. What is in a class, a module or a function is shared by all code that uses it.
FIXED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, logging.Logger, np.dtype, np.generic)


MEMBER = types.MemberDescriptorType  # of a slot


class _Contents:
    """What is in the attributes of a model's layers and of the loss, at any depth, as marks that can be compared.

    Attributes:
        marks: differ from earlier ones if anything was set or changed in place.
        unknown: the type of an object that does not show what is in it.
    """

    def __init__(self, learner: Learner) -> None:
        assert learner.module is not None
        self.marks: list[object] = []
        self.unknown: type | None = None
        self._held: list[object] = []  # a new object may get the address of one that is gone
        layers = dict(learner.module.named_modules())
        self._seen = {id(layer) for layer in layers.values()}
        own = {"training", "_parameters", "_buffers", "_modules"}  # which the learner passes in
        for place, layer in layers.items():
            self.marks.append(place)
            self._named({name: value for name, value in vars(layer).items() if name not in own}, 0)
        self._look(learner.loss_function, 0)

    def _named(self, values: dict[str, object], depth: int) -> None:
        self.marks.append([*values])
        self._each(values.values(), depth)

    def _each(self, values: Iterable[object], depth: int) -> None:
        for value in values:
            self._look(value, depth + 1)

    def _look(self, value: object, depth: int) -> None:
        """Add the marks of a value and of what is in it."""
        if isinstance(value, VALUES):
            self.marks.append((type(value), repr(value)))
            return
        self.marks.append(id(value))
        self._held.append(value)
        if id(value) in self._seen or isinstance(value, FIXED):
            return
        self._seen.add(id(value))
        if depth > DEPTH:
            self.unknown = type(value)
        elif (state := _state(value)) is not None:
            self.marks.append(state)
        elif isinstance(value, dict):
            self._each((part for pair in value.items() for part in pair), depth)
        elif isinstance(value, list | tuple | deque | set | frozenset):
            self.marks.append(len(value))
            self._each(value, depth)
        elif isinstance(value, weakref.ref):
            self._held.append(target := value())
            self.marks.append(id(target))
        elif isinstance(value, types.MethodType):
            self._look(value.__self__, depth + 1)
        elif isinstance(value, partial):
            self._each((value.func, value.args, value.keywords), depth)
        elif not self._look_inside(value, depth):
            self.unknown = type(value)
        if isinstance(value, dict | list | tuple | deque | set | frozenset) and hasattr(value, "__dict__"):
            self._named(vars(value), depth)

    def _look_inside(self, value: object, depth: int) -> bool:
        """Look at an object's attributes; whether it has such."""
        kinds = [kind for kind in type(value).__mro__ if "__slots__" in vars(kind)]
        slots = [name for kind in kinds for name, part in vars(kind).items() if isinstance(part, MEMBER)]
        if not slots and not hasattr(value, "__dict__"):
            return False
        own = {name: getattr(value, name) for name in slots if hasattr(value, name)}
        self._named({**own, **getattr(value, "__dict__", {})}, depth)
        return True


def _state(value: object) -> object:
    """What changes if this is changed in place, of types that show it in a way of their own; else None."""
    if isinstance(value, Tensor):
        return value._version
    if isinstance(value, np.ndarray | bytearray):
        return value.tobytes() if isinstance(value, np.ndarray) else bytes(value)
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False))
    return value.get_state().numpy().tobytes() if isinstance(value, torch.Generator) else None
