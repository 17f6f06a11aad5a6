"""One number a client: the same whether it is one tensor or many blocks, and a value that a change does not touch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comfedl import tree, vector


@settings(deadline=None)
@given(data=st.data(), clients=st.integers(1, 40))
def test_blocks_are_a_tensor(data: st.DataObject, clients: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        plain = vector.full(clients, torch.nan)
        patched.setattr(vector, "FEW", 0)
        patched.setattr(vector, "BLOCK", 7)
        packed = vector.full(clients, torch.nan)
        assert isinstance(plain, torch.Tensor) and isinstance(packed, dict)
        for _ in range(3):
            who = data.draw(st.lists(st.integers(0, clients - 1), unique=True, min_size=1))
            values = torch.rand(len(who), dtype=torch.float64)
            before = vector.whole(packed).clone()
            changed = vector.put(packed, who, values)
            torch.testing.assert_close(vector.whole(packed), before, rtol=0, atol=0, equal_nan=True)
            packed, plain = changed, vector.put(plain, who, values)
            torch.testing.assert_close(vector.whole(packed), plain, rtol=0, atol=0, equal_nan=True)
            asked = data.draw(st.lists(st.integers(0, clients - 1)))
            taken = vector.take(packed, asked)
            torch.testing.assert_close(taken, vector.take(plain, asked), rtol=0, atol=0, equal_nan=True)
            assert taken.dtype == torch.float64


def test_a_change_copies_what_it_touches_and_no_more() -> None:
    before = vector.full(1_000_000, 0.0)
    after = vector.put(before, [3, 999_999], torch.ones(2, dtype=torch.float64))
    new = [name for name in after if after[name] is not before[name]]
    assert new == ["0", str(999_999 // vector.BLOCK)]
    assert float(vector.whole(after).sum()) == 2
    assert len({leaf.data_ptr() for leaf in tree.leaves(before)}) <= 2  # untouched blocks are one and the same
