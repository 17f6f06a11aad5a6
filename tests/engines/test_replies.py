"""What the server computes from stacked replies equals the plain formula on one reply at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comfedl.core import client_vector
from comfedl.engines.replies import LocalReplies, ReplyPart, StackedReplies

PATH = ("model", "params")


def both(clients: list[int]) -> tuple[StackedReplies, LocalReplies]:
    """Five clients in three parts, asked in any order, some of them twice."""
    generator = torch.Generator().manual_seed(0)

    def stack(count: int) -> dict[str, Any]:
        params = {"w": torch.randn(count, 4, 3, generator=generator), "b": torch.randn(count, 3, generator=generator)}
        return {"model": {"params": params}, "loss": torch.rand(count, generator=generator)}

    parts = [ReplyPart([0, 1], stack(2)), ReplyPart([2], stack(1)), ReplyPart([3, 4], stack(2))]
    stacked = StackedReplies(clients, parts)
    models, losses = list(stacked.each("model")), stacked.numbers("loss")
    return stacked, LocalReplies(clients, [{"model": m, "loss": x} for m, x in zip(models, losses, strict=True)])


@pytest.mark.parametrize("clients", [[0, 1, 2, 3, 4], [3, 0, 4, 2, 1], [2, 2, 0, 4, 4, 3, 1]])
@pytest.mark.parametrize("clips", [False, True])
def test_inner_products(clients: list[int], clips: bool) -> None:
    stacked, local = both(clients)
    origin = {"w": torch.full((4, 3), 0.5), "b": torch.ones(3)}
    other = {"w": torch.arange(12.0).view(4, 3), "b": torch.ones(3)}
    scale = (1 + torch.tensor(clients, dtype=torch.float64)) / 10 if clips else None
    found, wanted = stacked.gram(PATH, origin, other, scale), local.gram(PATH, origin, other, scale)
    for one, same in zip(found, wanted, strict=True):
        assert one.dtype == torch.float64
        torch.testing.assert_close(one, same, rtol=1e-5, atol=1e-5)
    first, last = (next(iter(local.each("model")))["params"], list(local.each("model"))[-1]["params"])
    by_hand = sum(float(((first[key] - origin[key]) * (last[key] - origin[key])).sum()) for key in origin)
    factor = 1.0 if scale is None else float(scale[0] * scale[-1])
    assert float(found[0][0, -1]) == pytest.approx(factor * by_hand, rel=1e-5)


@pytest.mark.parametrize("clients", [[0, 1, 2, 3, 4], [3, 0, 4, 2, 1], [2, 2, 0]])
def test_numbers_and_products_follow_the_order_that_was_asked(clients: list[int]) -> None:
    stacked, local = both(clients)
    torch.testing.assert_close(stacked.numbers("loss"), local.numbers("loss"))
    origin, direction = ({"w": torch.full((4, 3), x), "b": torch.full((3,), x)} for x in (0.5, 2.0))
    found, wanted = (each.products(PATH, origin, direction) for each in (stacked, local))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_whole_vector_is_replaced_as_it_is() -> None:
    values = torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64)
    assert client_vector.put(client_vector.full(3, 0.0), [0, 1, 2], values).tolist() == [3, 1, 2]
    assert client_vector.put(client_vector.full(3, 0.0), [2, 0, 1], values).tolist() == [1, 2, 3]
