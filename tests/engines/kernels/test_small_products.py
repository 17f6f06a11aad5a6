"""Products of small matrices: by either library the same numbers, and by NumPy's only where it is the faster one."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from comfedl.engines.kernels import small_products as module
from comfedl.engines.kernels.small_products import NARROW, SMALL, added, fast_products, products, small_by_numpy

SIDES = st.one_of(st.integers(1, 40), st.sampled_from([64, 97, 128, 512, 1009, 1024]))


@pytest.fixture(scope="module", params=[False, True], ids=["torch", "numpy"])
def library(request: pytest.FixtureRequest) -> Iterator[bool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "small_by_numpy", lambda: request.param)
        yield request.param


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of what NumPy multiplies: rows, the side in common, columns."""
    seen: list[tuple[int, ...]] = []
    plain: Callable[..., Any] = np.matmul

    def matmul(a: Any, b: Any, out: Any) -> Any:
        seen.append((*a.shape[-2:], b.shape[-1]))
        assert b.strides[-1] == b.itemsize  # or it would not be taken as small
        return plain(a, b, out=out)

    monkeypatch.setattr(np, "matmul", matmul)
    return seen


def laid(shape: tuple[int, int, int], turned: bool, seed: int) -> Tensor:
    """Matrices at random, which lie in memory as they are or transposed."""
    made = torch.randn(
        shape[0], *(shape[:0:-1] if turned else shape[1:]), generator=torch.Generator().manual_seed(seed)
    )
    return made.mT if turned else made


@pytest.mark.usefixtures("library")
@settings(deadline=None)
@given(st.integers(0, 3), SIDES, st.integers(1, 70), SIDES, st.tuples(*[st.booleans()] * 3))
def test_either_library(batch: int, rows: int, inner: int, columns: int, turned: tuple[bool, bool, bool]) -> None:
    a, b = laid((batch, rows, inner), turned[0], 0), laid((batch, inner, columns), turned[1], 1)
    room = torch.zeros(rows, batch, columns).transpose(0, 1) if turned[2] else None
    expected = torch.bmm(a.double(), b.double())
    nearly = {"rtol": 0.0, "atol": 1e-6 * (1 + inner)}
    with torch.inference_mode():
        found = products(a, b, out=room)
        assert room is None or found.data_ptr() == room.data_ptr()
        torch.testing.assert_close(found.double(), expected, **nearly)
        again = added(found, a, b)
    assert again.data_ptr() == found.data_ptr()
    torch.testing.assert_close(again.double(), 2 * expected, **nearly)


@pytest.mark.parametrize(
    ("shape", "seen"),
    [
        ((512, 32, 32), (512, 32, 32)),
        ((1000, 10, 100), (1000, 10, 100)),
        ((24, 16, 4096), (24, 16, 2048)),
        ((4096, 16, 24), (2048, 16, 24)),
        ((1024, 64, 64), (128, 64, 64)),
        ((32, 1024, 32), None),
        ((1, 64, 32), None),
        ((32, 64, 1), None),
        ((1009, 32, 32), None),
    ],
)
def test_what_is_cut(
    shape: tuple[int, int, int], seen: tuple[int, ...] | None, calls: list[tuple[int, ...]], library: bool
) -> None:
    """What is not small is cut evenly along its longer side, or left to torch."""
    rows, inner, columns = shape
    products(torch.zeros(2, rows, inner), torch.zeros(2, inner, columns))
    products(torch.zeros(2, inner, rows).mT, torch.zeros(2, columns, inner).mT)
    assert calls == ([seen] * 2 if library and seen is not None else [])
    assert all(math.prod(each) <= SMALL and max(each[0], each[2]) >= NARROW for each in calls)


@pytest.mark.usefixtures("library")
def test_what_is_not_finite_is_no_warning() -> None:
    a, b = torch.full((1, 8, 8), 3e38), torch.eye(8)[None]
    b[0, 0, 0] = torch.inf
    with warnings.catch_warnings(action="error"):
        found = products(a, b - b)
        assert found[0, :, 0].isnan().all() and (found[0, :, 1:] == 0).all()
        assert products(a, a).isinf().all()


@pytest.mark.usefixtures("library")
def test_double_precision_is_torchs(calls: list[tuple[int, ...]]) -> None:
    products(*torch.zeros(2, 3, 4, 4, dtype=torch.float64))
    assert not calls


@pytest.mark.parametrize(("told", "fast"), [("GenuineIntel", True), ("AuthenticAMD", False), (None, False)])
def test_whose_products_are_fast(told: str | None, fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if told is not None:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nvendor_id\t: {told}\n")
    monkeypatch.setattr(module, "Path", lambda name: tmp_path / Path(name).name)
    monkeypatch.setattr(module.platform, "processor", lambda: "")
    assert fast_products.__wrapped__() is fast


@pytest.mark.parametrize(
    ("fast", "able", "blas", "expected"),
    [
        (False, "AVX512", "scipy-openblas", True),
        (False, "AVX512", "openblas", True),
        (True, "AVX512", "scipy-openblas", False),
        (False, "AVX2", "scipy-openblas", False),
        (False, "AVX512", "mkl-sdl", False),
        (False, "NEON", "accelerate", False),
        (False, "AVX512", None, False),
    ],
)
def test_where_numpy_is_faster(
    fast: bool, able: str, blas: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "fast_products", lambda: fast)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: able)
    monkeypatch.setattr(
        np, "show_config", lambda mode: {"Build Dependencies": {"blas": {"name": blas}} if blas else {}}
    )
    assert small_by_numpy.__wrapped__() is expected
