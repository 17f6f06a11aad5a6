"""One number per client: the same as one tensor or as a log of updates, and immutable."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from comfedl.core import client_vector


@settings(deadline=None)
@given(data=st.data(), clients=st.integers(8, 40))
def test_changes_make_the_tensor(data: st.DataObject, clients: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        plain = client_vector.full(clients, torch.nan)
        patched.setattr(client_vector, "FEW", 7)
        listed = client_vector.full(clients, torch.nan)
        assert isinstance(plain, torch.Tensor) and isinstance(listed, dict)
        for _ in range(5):
            who = data.draw(st.lists(st.integers(0, clients - 1), unique=True, min_size=1))
            values = torch.rand(len(who), dtype=torch.float64)
            before = client_vector.to_tensor(listed).clone()
            changed = client_vector.put(listed, who, values)
            torch.testing.assert_close(client_vector.to_tensor(listed), before, rtol=0, atol=0, equal_nan=True)
            listed, plain = changed, client_vector.put(plain, who, values)
            assert len(listed["clients"]) <= 7
            torch.testing.assert_close(client_vector.to_tensor(listed), plain, rtol=0, atol=0, equal_nan=True)
            assert client_vector.to_tensor(listed).dtype == torch.float64


def test_a_change_copies_the_changes_and_not_all() -> None:
    before = client_vector.full(1_000_000, 0.0)
    once = client_vector.put(before, [3, 999_999], torch.ones(2, dtype=torch.float64))
    twice = client_vector.put(once, [3], torch.full((1,), 5.0, dtype=torch.float64))
    assert twice["all"] is before["all"] and len(twice["clients"]) == 3
    assert [float(client_vector.to_tensor(each).sum()) for each in (before, once, twice)] == [0, 2, 6]
