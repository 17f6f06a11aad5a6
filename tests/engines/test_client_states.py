"""Client states: rows of large tensors that read as trees, and rounds that can be rolled back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from comfedl.engines import client_states as module
from comfedl.engines.client_states import ClientStates
from comfedl.utils import tree


def state(value: float, size: int = 2) -> Any:
    return {"model": {"w": torch.full((size, 3), value), "b": torch.tensor(value)}, "count": torch.tensor(int(value))}


def equal(one: Any, other: Any) -> bool:
    pairs = zip(tree.named_leaves(one), tree.named_leaves(other), strict=True)
    return all(a == b and torch.equal(x, y) and x.dtype == y.dtype for (a, x), (b, y) in pairs)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_states_are_a_dict_that_remembers_the_last_round(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "BLOCK", 100)  # a few rows per block
        kept, now, before, value = ClientStates(), dict[int, Any](), dict[int, Any](), 0
        for _ in range(data.draw(st.integers(1, 12))):
            if data.draw(st.booleans()):
                kept.commit_round()
                before = dict(now)
            who = data.draw(st.lists(st.integers(0, 9), unique=True, min_size=1, max_size=5))
            size = data.draw(st.sampled_from([1, 2]))  # a method may keep more later
            new = [state(value := value + 1, size) for _ in who]
            kept.put(who, new[0] if len(who) == 1 else tree.map(lambda *leaves: torch.stack(leaves), *new))
            now |= dict(zip(who, new, strict=True))
            assert all((i in kept) == (i in now) for i in range(10))
            assert all(equal(kept.view(i), now[i]) for i in now)
            settled = kept.committed()
            assert settled.keys() == before.keys() and all(equal(settled[i], before[i]) for i in before)
        other = ClientStates()
        other.restore(kept.committed())
        assert other.committed().keys() == before.keys()
        assert all(equal(other.view(i), before[i]) for i in before)


def test_rows_are_used_again() -> None:
    kept = ClientStates()
    for number in range(50):
        kept.put([1, 2, 3], tree.map(lambda leaf: torch.stack([leaf] * 3), state(number)))
        kept.commit_round()
    (store,) = kept._stores.values()
    assert store._used == 6  # those of one round, and of the one before it


def test_states_are_copied() -> None:
    """A stored state is a copy of the step's tensors."""
    kept, mine = ClientStates(), state(1.0)
    kept.put([0], mine)
    mine["model"]["w"].zero_()
    assert equal(kept.view(0), state(1.0))


def test_a_client_that_keeps_nothing_takes_nothing() -> None:
    kept = ClientStates()
    kept.put([999_999], state(1.0))
    (store,) = kept._stores.values()
    assert store._used == 1 and len(store._blocks) == 1
