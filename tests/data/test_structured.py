"""Data with several inputs or targets per sample: how they are kept, split and refused."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import Dataset

import comfedl as cf
from comfedl.data.outer_share import set_aside
from comfedl.utils import samples, tree
from comfedl.utils.fingerprint import fingerprint

X = torch.arange(12.0).view(6, 2)
Y = torch.tensor([0, 1, 0, 1, 0, 1])
IDS = torch.arange(18).view(6, 3)


def both(k: int = 0) -> Any:
    return {"ids": IDS + k, "x": (X + k).numpy()}, Y


def test_every_tensor_of_a_client_stays_together_and_in_its_type() -> None:
    fed = cf.FederatedData({"b": both(100), "a": both()}, {"a": both(7)}).to(torch.float64, torch.device("cpu"))
    assert fed.names == ("a", "b") and [*fed.train.x] == ["ids", "x"] and fed.train.shape == {"ids": (3,), "x": (2,)}
    for k, name in ((0, "a"), (100, "b")):
        x, y = fed.train[name]
        assert torch.equal(x["ids"], IDS + k) and torch.equal(x["x"], (X + k).double()) and torch.equal(y, Y)
        assert x["ids"].dtype == torch.int64 and x["x"].dtype == torch.float64
    taken, _ = fed.train.take(1, np.array([[0, 2], [5, 5]]))
    assert torch.equal(taken["ids"], IDS[torch.tensor([[0, 2], [5, 5]])] + 100) and taken["x"].shape == (2, 2, 2)
    assert isinstance(cf.FederatedData({"a": ((X, IDS), Y)}).train["a"][0], tuple)


def test_the_order_of_keys_does_not_matter() -> None:
    one = cf.FederatedData({"a": both()}, {"a": both(1)})
    other = cf.FederatedData({"a": ({"x": X, "ids": IDS}, Y)}, {"a": ({"x": X + 1, "ids": IDS + 1}, Y)})
    assert fingerprint(*one.contents()) == fingerprint(*other.contents())


def test_what_identifies_the_data_has_the_keys() -> None:
    """Of a plain tensor it is what it always was, so that runs of earlier versions can be resumed."""
    plain = cf.FederatedData({"a": (X, Y)})
    assert [part for part in plain.contents() if isinstance(part, str)] == []
    assert fingerprint(*plain.contents()) == "5829eba314f4ffe738e079adb03864ee5da5eb0b864a29032aa2f6a5ade6fe48"
    prints = {
        fingerprint(*cf.FederatedData({"a": (x, Y)}).contents())
        for x in (X, (X,), {"x": X}, {"z": X}, (X, X + 1), {"x": X, "y": X + 1}, (X + 1, X))
    }
    assert len(prints) == 7


def test_flat_data_are_those_by_client() -> None:
    by_client = cf.FederatedData({"0": both(), "1": both(50)})
    x = {"ids": torch.cat([IDS, IDS + 50]), "x": torch.cat([X, X + 50])}
    flat = cf.FederatedData.from_flat((x, torch.cat([Y, Y]), [0, 6, 12]))
    for name in "01":
        pairs = zip(tree.leaves(by_client.train[name]), tree.leaves(flat.train[name]), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
    assert all(
        one.data_ptr() == other.data_ptr() for one, other in zip(tree.leaves(x), tree.leaves(flat.train.x), strict=True)
    )


def test_a_share_set_aside_takes_whole_samples() -> None:
    fed = cf.FederatedData(dict.fromkeys("ab", ((X, IDS), {"kind": Y, "size": X[:, 0]})))
    parts = set_aside(fed, 0.3, seed=4)
    assert parts.outer is not None
    for name in "ab":
        (x, ids), y = (
            tree.map(lambda *two: torch.cat(two), *(split[name][k] for split in (parts.train, parts.outer)))
            for k in (0, 1)
        )
        order = x[:, 0].argsort()
        assert torch.equal(x[order], X) and torch.equal(ids[order], IDS) and torch.equal(y["kind"][order], Y)
        assert torch.equal(y["size"], x[:, 0])
    # The draw of plain labels is stratified as ever.
    plain = set_aside(cf.FederatedData({"a": (X, Y)}), 0.3, 4)
    assert plain.outer is not None and sorted(plain.outer["a"][1].tolist()) == [0, 1]


def test_no_y() -> None:
    for value in ({"x": X, "ids": IDS}, ({"x": X, "ids": IDS}, None), ((X, IDS), None)):
        assert cf.FederatedData({"a": value}).train["a"][1].shape == (6, 0)


def test_a_list_has_numbered_clients() -> None:
    fed = cf.FederatedData([(X, Y)] * 11, [(X, Y)] * 11)
    assert fed.names[0] == "00" and len(fed) == 11 and fed.validation is not None


def test_columns_of_a_data_frame() -> None:
    df = pd.DataFrame({"one": [1.0, 2.0], "two": [3.0, 4.0], "kind": [1, 0], "text": ["u", "v"]})
    fed = cf.FederatedData({"a": (df[["one", "two"]], df["kind"])})
    assert torch.equal(fed.train["a"][0], torch.tensor([[1.0, 3.0], [2.0, 4.0]], dtype=torch.float64))
    assert fed.train["a"][1].tolist() == [1, 0]
    for given, words in (
        (df, ["train is a DataFrame", "from_dataframe"]),
        ({"a": df}, ["'a'", "is a DataFrame", "(df[inputs], df[target])"]),
        ({"a": (df[["one", "text"]], df["kind"])}, ["x of client 'a'", "object", "from_dataframe"]),
    ):
        with pytest.raises(cf.DataError) as error:
            cf.FederatedData(given)
        text = str(error.value)
        assert [word for word in words if word not in text] == [] and "\n" not in text, text


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (({"x": X, "ids": IDS[:5]}, Y), ["x of client 'a' in train", "6 samples at 'x' but 5 at 'ids'"]),
        (((X, IDS[:5]), Y), ["x of client 'a'", "5 samples at 1 but 6 at 0"]),
        (({"x": X}, Y[:5]), ["'a' has 6 samples in x but 5 in y"]),
        ((X, {"kind": Y, "size": X[:4, 0]}), ["y of client 'a'", "4 samples at 'size'"]),
        (({"x": {"deep": X}}, Y), ["a dict at 'x'", "without a further level"]),
        (({0: X}, Y), ["the key 0", "give strings"]),
        (({}, Y), ["is an empty dict"]),
        (({"x": ["a"] * 6}, Y), ["x['x'] of client 'a'", "cannot be read as numbers"]),
        ((X, IDS, Y), ["a tuple of 3", "((first, second), y)"]),
        (([X, IDS], Y), ["cannot be read as numbers", "as ((first, second), y)"]),
        ([(X[0], 1), (X[1], 0)], ["from_datasets"]),
        (({"x": X / 0}, Y), ["'a' has", "in x['x'] of train"]),
        ({"x": X, "y": Y}, ["'a' in train is a dict with x and y", "give the pair (x, y)"]),
    ],
)
def test_what_is_refused(value: Any, words: list[str]) -> None:
    with pytest.raises(cf.DataError) as error:
        cf.FederatedData({"a": value})
    text = str(error.value)
    assert [word for word in words if word not in text] == [] and len(text) < 400, text


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (((X, IDS), Y), ["'b' has x as a tuple of 2 in train but client 'a' as a dict of 'ids', 'x'"]),
        (({"ids": IDS}, Y), ["'b' has x as a dict of 'ids'"]),
        (({"ids": IDS, "x": X[:, :1]}, Y), ["'b' has x['x'] samples of shape (1,)", "(2,)"]),
        (({"ids": IDS.float(), "x": X}, Y), ["'b' has x['ids'] of type torch.float32"]),
    ],
)
def test_clients_that_differ(value: Any, words: list[str]) -> None:
    with pytest.raises(cf.DataError) as error:
        cf.FederatedData({"a": both(), "b": value})
    assert [word for word in words if word not in str(error.value)] == [], str(error.value)
    with pytest.raises(cf.DataError, match=r"in train but .* in validation|in validation but"):
        cf.FederatedData({"a": both(), "b": both()}, {"b": ({"ids": IDS}, Y)})


def test_what_is_no_data() -> None:
    for given in (X, 3, "a", [X, X]):
        with pytest.raises(cf.DataError, match="it must be a dict by client name; give"):
            cf.FederatedData(given)  # type: ignore[arg-type]


# Torch Datasets.


class Listed(Dataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, k: int) -> Any:
        return self.items[k]


def test_datasets_of_dicts_and_tuples() -> None:
    data = Listed([({"x": X[k], "ids": IDS[k].tolist()}, Y[k]) for k in range(6)])
    fed = cf.FederatedData.from_datasets({"a": data, "b": data}, validation=0.3, test=None)
    x, _ = fed.train["a"]
    assert torch.equal(x["ids"][:, 0] * 2, x["x"][:, 0].long() * 3) and len(fed.train["a"][1]) == 4
    pairs = cf.FederatedData.from_datasets([Listed([((X[k], IDS[k]), Y[k]) for k in range(6)])], None, None)
    assert isinstance(pairs.train.x, tuple) and torch.equal(pairs.train.x[1], IDS)
    mixed = Listed([({"x": X[0]}, Y[0]), ({"z": X[0]}, Y[0])])
    with pytest.raises(cf.DataError, match="samples that are a dict of 'x' and a dict of 'z'"):
        cf.FederatedData.from_datasets({"a": mixed})
    with pytest.raises(cf.DataError, match=r"shape \(2,\) and \(1,\) at \['x'\]"):
        cf.FederatedData.from_datasets({"a": Listed([({"x": X[0]}, Y[0]), ({"x": X[0, :1]}, Y[0])])})


class Augmented(Listed):
    """Noise on the samples, as of a random crop; ``only`` on some of them."""

    def __init__(self, items: list[Any], only: range) -> None:
        super().__init__(items)
        self.only = only

    def __getitem__(self, k: int) -> Any:
        x, y = super().__getitem__(k)
        return (x + random.random() if k in self.only else x), y


@pytest.mark.parametrize("only", [range(1), range(6), range(5, 6)])
def test_a_random_dataset_is_warned_of(only: range) -> None:
    items = [(X[k], Y[k]) for k in range(6)]
    with pytest.warns(UserWarning, match=r"Client 'a' in train has random samples.*fit\(transform=\.\.\.\)"):
        cf.FederatedData.from_datasets({"a": Augmented(items, only)}, None, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cf.FederatedData.from_datasets({"a": Listed(items)}, None, None)


# Hugging Face.


@pytest.mark.filterwarnings("ignore")
def test_columns_of_tokens_are_a_dict_of_inputs() -> None:
    datasets = pytest.importorskip("datasets", reason="needs the extra hf")
    rows = {"input_ids": IDS.tolist(), "attention_mask": (IDS > 4).long().tolist(), "label": Y.tolist()}
    one = datasets.Dataset.from_dict({**rows, "who": ["a", "b"] * 3, "text": ["so"] * 6})
    columns = ["input_ids", "attention_mask"]
    fed = cf.FederatedData.from_huggingface(one, x=columns, client="who", validation=0.0, test=0.0)
    x, y = fed.train["b"]
    assert torch.equal(x["input_ids"], IDS[1::2]) and x["attention_mask"].dtype == torch.int64 and y.tolist() == [1] * 3
    single = cf.FederatedData.from_huggingface({"a": one}, x="input_ids", validation=0.0, test=0.0)
    assert torch.equal(single.train["a"][0], IDS)
    parted = datasets.DatasetDict({"train": one, "test": one})
    assert cf.FederatedData.from_huggingface(parted, x=columns, client="who").test is not None
    labelled = cf.FederatedData.from_huggingface({"a": one}, y="input_ids", x=columns, validation=0.0, test=0.0)
    assert torch.equal(labelled.train["a"][1], IDS)
    with pytest.raises(cf.DataError, match="samples of 'text' have the type"):
        cf.FederatedData.from_huggingface(one, client="who")
    ragged = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3]], "label": [0, 1]})
    with pytest.raises(cf.DataError, match=r"'input_ids' cannot be stacked .* padded to one length"):
        cf.FederatedData.from_huggingface({"a": ragged})


def test_samples_in_words() -> None:
    assert samples.structure(X) == "one tensor" and samples.structure((X,)) == "a tuple of 1"
    assert samples.described({"x": X}) == "['x'] (2,) torch.float32" and samples.described(X) == "(2,) torch.float32"
