"""FederatedData: accepted inputs, and the errors about invalid ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

import comfedl as cf
from comfedl.data.federated import Split

X, Y = np.arange(12.0).reshape(4, 3), np.array([0, 1, 0, 2])
GOOD = {"ann": (X, Y), "bob": (X[:2], Y[:2])}


def with_bob(*pair: Any) -> dict[str, Any]:
    return {"ann": (X, Y), "bob": tuple(pair)}


def broken(value: float) -> np.ndarray:
    x = X.copy()
    x[1, 2] = value
    return x


@pytest.mark.parametrize(
    ("train", "says"),
    [
        ({}, "no clients"),
        ({"": (X, Y)}, "''"),
        ({1: (X, Y)}, "1"),
        (with_bob(X, Y[:3]), "4 samples in x but 3 in y"),
        (with_bob(X[:0], Y[:0]), "no samples"),
        (with_bob(X, Y, Y), "tuple of 3"),
        (with_bob(X), "tuple of 1"),
        (with_bob(3.0, Y), "single number"),
        (with_bob(X, 1), "single number"),
        (with_bob(X * 1j, Y), "complex"),
        (with_bob("text", Y), "cannot be read"),
        (with_bob(None, Y), "cannot be read"),
        (with_bob([[1.0], [1.0, 2.0]], [0, 1]), "cannot be read"),
        (with_bob(np.array([["a"], ["b"]]), [0, 1]), "cannot be read"),
        (with_bob(np.array([{}, {}]), [0, 1]), "cannot be read"),
        (with_bob(X[:, :2], Y), "shape (2,)"),
        (with_bob(X, Y[:, None]), "shape (1,)"),
        (with_bob(X.astype(int), Y), "int"),
        (with_bob(X, Y.astype(float)), "float"),
        (with_bob(broken(np.nan), Y), "NaN"),
        (with_bob(broken(np.inf), Y), "NaN or infinite"),
        ({"ann": X, "bob": (X, Y)}, "shape"),
    ],
)
def test_bad_train_data_is_refused_with_the_clients_name(train: dict[Any, Any], says: str) -> None:
    with pytest.raises(cf.DataError) as caught:
        cf.FederatedData(train)
    assert says in str(caught.value)
    assert "bob" not in train or "'bob'" in str(caught.value)


@pytest.mark.parametrize("split", ["validation", "test", "outer"])
@pytest.mark.parametrize(
    ("bob", "says"),
    [
        ((X, Y[:3]), "4 samples in x but 3 in y"),
        ((X[:0], Y[:0]), "no samples"),
        ((broken(np.nan), Y), "NaN"),
        ((X, Y, Y), "tuple of 3"),
        ((X[:, :2], Y), "shape (2,)"),
    ],
)
def test_bad_data_elsewhere_is_refused_with_split_and_name(split: str, bob: Any, says: str) -> None:
    with pytest.raises(cf.DataError) as caught:
        cf.FederatedData(GOOD, **{split: {"ann": (X, Y), "bob": bob}})
    assert says in str(caught.value) and "'bob'" in str(caught.value) and split in str(caught.value)


@pytest.mark.parametrize("split", ["validation", "test", "outer"])
def test_a_client_without_train_data_is_refused(split: str) -> None:
    with pytest.raises(cf.DataError, match=f"'zoe' is in {split} but not in train"):
        cf.FederatedData(GOOD, **{split: {**GOOD, "zoe": (X, Y)}})
    with pytest.raises(cf.DataError, match=split):
        cf.FederatedData(GOOD, **{split: {}})


def test_outer_data_are_needed_for_all_clients_or_none() -> None:
    with pytest.raises(cf.DataError, match="'bob' has no outer data"):
        cf.FederatedData(GOOD, outer={"ann": (X, Y)})


@pytest.mark.parametrize("split", ["validation", "test"])
def test_held_out_samples_have_the_train_shape(split: str) -> None:
    for pair in ((X[:, :2], Y), (X, np.stack([Y, Y], axis=1))):
        with pytest.raises(cf.DataError, match=split):
            cf.FederatedData(GOOD, **{split: {"bob": pair}})


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_y_must_be_finite_too(value: float) -> None:
    y = Y.astype(float)
    with pytest.raises(cf.DataError, match=r"'bob' has 1 NaN or infinite value in y of train"):
        cf.FederatedData({"ann": (X, y), "bob": (X, np.where(Y == 2, value, y))})


def test_the_number_of_bad_values_is_that_clients() -> None:
    x = X.copy()
    x[:2] = np.nan
    with pytest.raises(cf.DataError, match=r"'bob' has 6 NaN or infinite values in x"):
        cf.FederatedData(with_bob(x, Y))


# Accepted inputs.


def test_a_split_is_a_mapping() -> None:
    fed = cf.FederatedData({"bob": (X[:2], Y[:2]), "ann": (X, Y)}, validation={"bob": (X[2:], Y[2:])})
    assert isinstance(fed.train, Mapping)
    assert list(fed.names) == list(fed.train) == ["ann", "bob"] and len(fed) == len(fed.train) == 2
    assert fed.train.sizes.tolist() == [4, 2]
    for name, (x, y) in {"ann": (X, Y), "bob": (X[:2], Y[:2])}.items():
        assert fed.train[name][0].numpy().tolist() == x.tolist()
        assert fed.train[name][1].numpy().tolist() == y.tolist()
    assert fed.validation is not None and fed.test is None and fed.outer is None
    assert list(fed.validation) == ["bob"] and len(fed.validation) == 1
    assert "ann" not in fed.validation and "bob" in fed.validation and fed.validation.get("ann") is None
    for missing in ("ann", "zoe"):
        with pytest.raises(KeyError):
            fed.validation[missing]
    assert dict(fed.validation.items()).keys() == {"bob"}
    assert "2 clients" in repr(fed) and "train 6" in repr(fed) and "validation 2" in repr(fed)


def test_the_outer_data_default_to_the_train_data() -> None:
    fed = cf.FederatedData(GOOD)
    assert fed.split("outer") is fed.train and fed.split("validation") is None
    own = cf.FederatedData(GOOD, outer={"ann": np.ones((7, 2, 2)), "bob": np.zeros((1, 2, 2))})
    assert own.split("outer") is own.outer and own.outer["ann"][0].shape == (7, 2, 2)
    assert own.outer["ann"][1].shape == (7, 0)


def test_x_alone() -> None:
    fed = cf.FederatedData({"ann": X, "bob": torch.ones(2, 3)})
    x, y = fed.train["bob"]
    assert x.shape == (2, 3) and y.shape == (2, 0)


@pytest.mark.parametrize(
    "pair", [(X.tolist(), Y.tolist()), [X, Y], (torch.tensor(X), torch.tensor(Y)), (X, Y.astype(np.uint8))]
)
def test_arrays_tensors_and_lists(pair: Any) -> None:
    x, y = cf.FederatedData({"ann": pair}).train["ann"]
    assert x.numpy().tolist() == X.tolist() and y.tolist() == Y.tolist() and y.dtype == torch.int64


def test_an_array_with_negative_strides() -> None:
    x, y = cf.FederatedData({"ann": (X[::-1], Y[::-1])}).train["ann"]
    assert x.numpy().tolist() == X[::-1].tolist() and y.tolist() == Y[::-1].tolist()


def test_the_arrays_are_copied() -> None:
    x = X.copy()
    tensor = torch.tensor(X, requires_grad=True)
    fed = cf.FederatedData({"ann": (x, Y), "bob": (tensor, Y)})
    x[:] = -1
    assert float(fed.train["ann"][0].min()) == 0 and not fed.train["bob"][0].requires_grad
    alone = cf.FederatedData({"ann": (x, Y)})
    x[:] = -2
    assert float(alone.train["ann"][0].min()) == -1


def test_take_and_samples_of() -> None:
    fed = cf.FederatedData({"ann": (X, Y), "bob": (X + 100, Y)})
    x, y = fed.train.take(1, np.array([[3, 0], [1, 1]]))
    assert x.shape == (2, 2, 3) and y.tolist() == [[2, 0], [1, 1]]
    assert x[0, 0].tolist() == (X[3] + 100).tolist() and x[1, 1].tolist() == (X[1] + 100).tolist()
    assert fed.train.samples_of(1)[0].numpy().tolist() == (X + 100).tolist()


def test_to_another_dtype() -> None:
    """Floating-point tensors change their dtype, labels do not; the original stays as it is."""
    fed = cf.FederatedData(GOOD, validation={"ann": (X, Y)})
    moved = fed.to(torch.float32, torch.device("cpu"))
    assert moved.train.x.dtype == moved.validation.x.dtype == torch.float32 and moved.train.y.dtype == torch.int64
    assert fed.train.x.dtype == torch.float64 and list(moved.names) == list(fed.names)


# Splits that are already flat.


def flat(rows: list[int] | None = None, offsets: tuple[int, ...] = (0, 3, 4), x: np.ndarray = X) -> Split:
    chosen = None if rows is None else torch.tensor(rows)
    return Split(torch.tensor(x), torch.tensor(Y), ("ann", "bob"), np.array(offsets), chosen)


def test_from_splits() -> None:
    fed = cf.FederatedData.from_splits({"train": flat([3, 1, 0, 2]), "test": flat([0], (0, 0, 1))})
    assert fed.train["ann"][1].tolist() == [2, 1, 0] and fed.train["bob"][0].tolist() == [X[2].tolist()]
    assert list(fed.test) == ["bob"] and fed.test["bob"][1].tolist() == [0]
    x, _ = fed.train.take(0, np.array([2, 0]))
    assert x.tolist() == X[[0, 3]].tolist()


def test_from_splits_trains_like_the_dicts() -> None:
    pairs = {"ann": (X[[3, 1, 0]], Y[[3, 1, 0]]), "bob": (X[[2]], Y[[2]])}
    model, algorithm = torch.nn.Linear(3, 3).double(), cf.ComFedL(outer=cf.KL(0.5), batch_size=2)
    one = cf.fit(model, cf.FederatedData(pairs), algorithm, rounds=3)
    other = cf.fit(model, cf.FederatedData.from_splits({"train": flat([3, 1, 0, 2])}), algorithm, rounds=3)
    assert all(torch.equal(one.params[name], other.params[name]) for name in one.params)


def test_from_splits_refuses_nan() -> None:
    with pytest.raises(cf.DataError, match="'bob' has 1 NaN or infinite value in x of train"):
        cf.FederatedData.from_splits({"train": flat([0, 2, 3, 1], x=broken(np.nan))})


def test_from_splits_refuses_a_client_without_train_data() -> None:
    """As the constructor does: such a client could not take part in a round."""
    with pytest.raises(cf.DataError, match="'bob'"):
        cf.FederatedData.from_splits({"train": flat([0, 2, 3], (0, 3, 3))})


def test_from_splits_refuses_unsorted_names() -> None:
    split = Split(torch.tensor(X), torch.tensor(Y), ("bob", "ann"), np.array([0, 3, 4]))
    with pytest.raises(cf.DataError, match="'bob' comes before 'ann'"):
        cf.FederatedData.from_splits({"train": split})


def test_from_splits_checks_only_rows_that_a_client_has() -> None:
    fed = cf.FederatedData.from_splits({"train": flat([0, 2, 3], (0, 2, 3), x=broken(np.nan))})
    assert fed.train.sizes.tolist() == [2, 1]


# All clients concatenated.

OFFSETS = [0, 3, 4]


def test_from_flat_is_from_dicts() -> None:
    names = ["ann", "bob"]
    given = cf.FederatedData.from_flat(
        (X, Y, OFFSETS), (X[:2], Y[:2], [0, 0, 2]), outer=(X, None, OFFSETS), names=names
    )
    pairs = {"ann": (X[:3], Y[:3]), "bob": (X[3:], Y[3:])}
    same = cf.FederatedData(pairs, {"bob": (X[:2], Y[:2])}, outer={"ann": X[:3], "bob": X[3:]})
    assert list(given.names) == list(same.names) == names
    for split in ("train", "validation", "outer"):
        ours, theirs = given.split(split), same.split(split)
        assert ours is not None and theirs is not None and ours.sizes.tolist() == theirs.sizes.tolist()
        for name in theirs:
            assert all(torch.equal(a, b) for a, b in zip(ours[name], theirs[name], strict=True))
    model, algorithm = torch.nn.Linear(3, 3).double(), cf.ComFedL(outer=cf.KL(0.5), batch_size=2)
    one, other = (cf.fit(model, fed, algorithm, rounds=3) for fed in (given, same))
    assert all(torch.equal(one.params[name], other.params[name]) for name in one.params)
    assert one.clients == other.clients


def test_from_flat_copies_nothing() -> None:
    x, y = torch.zeros(4, 3), torch.tensor(Y)
    fed = cf.FederatedData.from_flat((x, y, torch.tensor(OFFSETS)))
    assert fed.train.x.data_ptr() == x.data_ptr() and fed.train.y.data_ptr() == y.data_ptr()
    array = np.zeros((4, 3))
    fed = cf.FederatedData.from_flat((array, Y.astype(np.int16), np.array(OFFSETS, dtype=np.uint8)))
    assert fed.train.x.data_ptr() == array.ctypes.data and fed.train.y.dtype == torch.int64


def test_from_flat_numbers_the_clients() -> None:
    fed = cf.FederatedData.from_flat((np.zeros((12, 1)), np.zeros(12), np.arange(13)))
    assert fed.names[0] == "00" and fed.names[-1] == "11" and len(fed) == 12
    assert fed.train["07"][0].shape == (1, 1) and "7" not in fed.train


@pytest.mark.parametrize(
    ("train", "says"),
    [
        ((X, Y), "train is a tuple of 2, but it must be (x, y, offsets)"),
        (3, "train is a int, but"),
        ((X, Y[:3], OFFSETS), "train has 4 samples in x but 3 in y"),
        ((X[:0], Y[:0], [0, 0]), "train has no samples"),
        ((None, Y, OFFSETS), "x in train cannot be read"),
        (("text", Y, OFFSETS), "x in train cannot be read"),
        ((X * 1j, Y, OFFSETS), "x in train is complex"),
        ((X, 1, OFFSETS), "y in train is a single number"),
        ((X, Y, [[0, 4]]), "shape (1, 2)"),
        ((X, Y, [0.0, 4.0]), "float64"),
        ((X, Y, [0]), "one more than there are clients"),
        ((X, Y, None), "object"),
        ((X, Y, [[0], [1, 2]]), "offsets of train cannot be read"),
        ((X, Y, [0, 3]), "go from 0 to 3, but they must increase from 0 to 4"),
        ((X, Y, [1, 4]), "go from 1 to 4"),
        ((X, Y, [0, 3, 2, 4]), "decrease at index 2"),
        ((X, Y, [0, 3, 3, 4]), "Client '1' has no samples in train"),
        ((broken(np.nan), Y, [0, 1, 4]), "Client '1' has 1 NaN or infinite value in x of train"),
    ],
)
def test_invalid_flat_data_are_refused(train: Any, says: str) -> None:
    with pytest.raises(cf.DataError) as caught:
        cf.FederatedData.from_flat(train)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"test": (X, Y, [0, 4])}, "There are 2 offsets in test but 3 in train"),
        ({"validation": (X[:, :2], Y, OFFSETS)}, "validation; give the same shape"),
        ({"outer": (X, Y, [0, 0, 4])}, "Client '0' has no outer data"),
        ({"names": ["b", "a"]}, "'b' comes before 'a'"),
        ({"names": ["a"]}, "1 names for 2 clients"),
    ],
)
def test_flat_data_that_do_not_match_are_refused(more: dict[str, Any], says: str) -> None:
    with pytest.raises(cf.DataError) as caught:
        cf.FederatedData.from_flat((X, Y, OFFSETS), **more)
    assert says in str(caught.value)


def test_a_bad_value_among_many_clients_is_found_fast() -> None:
    x = torch.zeros(400_000, 2)
    x[300_001, 1] = torch.inf
    with pytest.raises(cf.DataError, match="Client '150000' has 1 NaN or infinite value in x of train"):
        cf.FederatedData.from_flat((x, torch.zeros(400_000), np.arange(200_001) * 2))
