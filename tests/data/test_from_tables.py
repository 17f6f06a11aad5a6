"""FederatedData from tables, torch Datasets, folders and Hugging Face datasets."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import comfedl as cf
from comfedl.data.tabular import Encoding, read_csv

FRAME = pd.DataFrame(
    {
        "hospital": ["north"] * 6 + ["south"] * 6 + ["east"] * 8,
        "age": [30.0, 41, 52, 63, 74, 85, 20, 31, 42, 53, 64, 75, 33, 44, 55, 66, 77, 88, 99, 10],
        "smoker": [True, False] * 10,
        "ward": ["b", "a", "c", "a"] * 5,
        "outcome": ["ill", "well"] * 10,
        "days": np.linspace(0.5, 20, 20),
    }
)


def split_sizes(fed: cf.FederatedData) -> list[int]:
    return [0 if split is None else int(split.sizes.sum()) for split in (fed.train, fed.validation, fed.test)]


# Tables.


def test_a_table_becomes_numbers_and_labels() -> None:
    # With this seed each ward occurs at two hospitals among the train rows.
    fed = cf.FederatedData.from_dataframe(FRAME, "hospital", target="outcome", seed=7, drop=["days"], scale=False)
    assert fed.names == ("east", "north", "south")
    assert sum(split_sizes(fed)) == 20
    encoding = fed.encoding
    assert encoding is not None and encoding.classes == ("ill", "well")
    assert [name for column in encoding.columns for name in column.names] == [
        *("age", "smoker", "ward=a", "ward=b", "ward=c")
    ]
    x, y = fed.train["north"]
    assert x.dtype == torch.float32 and y.dtype == torch.int64
    for row, label in zip(x.tolist(), y.tolist(), strict=True):
        line = FRAME[(FRAME.hospital == "north") & (FRAME.age == row[0])].iloc[0]
        expected = [line.age, float(line.smoker), *(float(line.ward == ward) for ward in "abc")]
        assert row == expected and encoding.classes[label] == line.outcome


def test_scales_are_those_of_the_pooled_train_rows() -> None:
    frame = FRAME.assign(part=(["train"] * 3 + ["test"]) * 5)
    fed = cf.FederatedData.from_dataframe(frame, "hospital", "outcome", split="part", drop=["days"])
    train = frame[frame.part == "train"].age
    assert fed.encoding is not None
    age = fed.encoding.columns[0]
    assert age.mean == pytest.approx(train.mean()) and age.scale == pytest.approx(train.std(ddof=0))
    pooled = torch.cat([fed.train[name][0][:, 0] for name in fed.names])
    assert float(pooled.mean()) == pytest.approx(0, abs=1e-6)
    assert float(pooled.std(correction=0)) == pytest.approx(1, abs=1e-6)
    flag = torch.cat([fed.train[name][0][:, 1] for name in fed.names])
    assert set(flag.tolist()) == {0.0, 1.0}
    # Test rows do not affect it.
    other = cf.FederatedData.from_dataframe(
        frame.assign(age=frame.age.where(frame.part == "train", 1e6)),
        "hospital",
        "outcome",
        split="part",
        drop=["days"],
    )
    assert other.encoding is not None and other.encoding.columns[0] == age


def test_a_clients_split_does_not_depend_on_the_others() -> None:
    whole = cf.FederatedData.from_dataframe(FRAME, "hospital", "outcome", scale=False)
    part = cf.FederatedData.from_dataframe(FRAME[FRAME.hospital != "south"], "hospital", "outcome", scale=False)
    assert torch.equal(whole.train["north"][0], part.train["north"][0])
    again = cf.FederatedData.from_dataframe(FRAME, "hospital", "outcome", scale=False, seed=1)
    assert not torch.equal(whole.train["east"][0], again.train["east"][0])


def test_no_row_is_in_two_splits_and_labels_keep_their_share() -> None:
    n = 1000
    frame = pd.DataFrame({"site": ["a", "b"] * 500, "x": np.arange(n), "y": np.arange(n) % 10 == 0})
    fed = cf.FederatedData.from_dataframe(frame, "site", "y", scale=False, validation=0.25, test=0.1)
    seen = [int(v) for split in (fed.train, fed.validation, fed.test) for name in split for v in split[name][0][:, 0]]
    assert sorted(seen) == list(range(n))
    assert split_sizes(fed) == pytest.approx([650, 250, 100], abs=4)
    ones = [float(split["a"][1].double().mean()) for split in (fed.train, fed.validation)]
    assert ones[0] == pytest.approx(ones[1], abs=0.02)
    held = [{int(v) // 2 for v in fed.validation[name][0][:, 0]} for name in ("a", "b")]
    assert held[0] != held[1]  # identical clients draw independently


def test_regression_and_its_scale() -> None:
    fed = cf.FederatedData.from_dataframe(FRAME, "hospital", "days", drop=["outcome"], scale_target=True)
    assert fed.train.y.is_floating_point() and fed.encoding is not None and fed.encoding.classes == ()
    assert float(fed.train.y.mean()) == pytest.approx(0, abs=1e-6)
    back = fed.train.y * fed.encoding.scale + fed.encoding.mean
    assert set(np.round(back.numpy(), 3)) <= set(np.round(FRAME.days.to_numpy(dtype=np.float32), 3))


def test_integers_are_labels_unless_the_task_says_otherwise() -> None:
    frame = FRAME.assign(y=[0, 2] * 10).drop(columns=["outcome", "days"])
    labels = cf.FederatedData.from_dataframe(frame, "hospital", "y")
    assert labels.encoding is not None and labels.encoding.classes == ("0", "2")
    assert set(labels.train.y.tolist()) == {0, 1}
    numbers = cf.FederatedData.from_dataframe(frame, "hospital", "y", task="regression")
    assert set(numbers.train.y.tolist()) == {0.0, 2.0}


def test_csv_polars_like_frames_and_dicts_are_the_same_table(tmp_path: Path) -> None:
    FRAME.to_csv(tmp_path / "patients.csv", index=False)
    made = [
        cf.FederatedData.from_dataframe(table, "hospital", "outcome")
        for table in (FRAME, {name: FRAME[name].tolist() for name in FRAME}, read_csv(tmp_path / "patients.csv"))
    ]
    semicolons = tmp_path / "semicolons.csv"
    FRAME.to_csv(semicolons, index=False, sep=";", encoding="utf-8-sig")
    made.append(cf.FederatedData.from_dataframe(read_csv(semicolons), "hospital", "outcome"))
    for other in made[1:]:
        assert other.encoding == made[0].encoding
        assert torch.equal(other.train.x, made[0].train.x) and torch.equal(other.train.y, made[0].train.y)


def test_new_rows_are_encoded_as_in_training(tmp_path: Path) -> None:
    fed = cf.FederatedData.from_dataframe(FRAME, "hospital", "outcome", seed=7)
    assert fed.encoding is not None
    kept = Encoding.from_dict(json.loads(json.dumps(fed.encoding.to_dict())))
    assert kept == fed.encoding
    path = tmp_path / "new.csv"
    path.write_text("ward,age,smoker,days,id\nc,50,true,3,7\n")
    table = read_csv(path)
    expected = [(50 - kept.columns[0].mean) / kept.columns[0].scale, 1, 0, 0, 1]
    assert kept.x(table)[0, :5] == pytest.approx(expected, rel=1e-6)
    path.write_text("ward,age,smoker,days\nd,50,true,3\n")
    assert kept.x(read_csv(path))[0, 2:5].tolist() == [0, 0, 0]  # a ward that training did not see
    path.write_text("ward,smoker\na,true\n")
    with pytest.raises(cf.DataError, match="no column 'age'"):
        kept.x(read_csv(path))
    path.write_text("ward,age,smoker,days\na,old,true,3\n")
    with pytest.raises(cf.DataError, match=r"'age' of new\.csv has 'old' in row 1, but it must have numbers"):
        kept.x(read_csv(path))


def test_missing_values_are_refused_or_dropped() -> None:
    frame = FRAME.copy()
    frame.loc[[2, 7], "age"] = np.nan
    with pytest.raises(cf.DataError, match=r"'age' of the table has 2 missing values \(the first in row 3\)"):
        cf.FederatedData.from_dataframe(frame, "hospital", "outcome")
    fed = cf.FederatedData.from_dataframe(frame, "hospital", "outcome", missing="drop")
    assert sum(split_sizes(fed)) == 18
    nullable = FRAME.assign(age=FRAME.age.astype("Int64"))
    nullable.loc[3, "age"] = pd.NA
    with pytest.raises(cf.DataError, match="1 missing value "):
        cf.FederatedData.from_dataframe(nullable, "hospital", "outcome")


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        ({}, {"client": "hopsital"}, "no column 'hopsital'; did you mean 'hospital'"),
        ({}, {"target": "y"}, "no column 'y'"),
        ({}, {"target": "hospital"}, "'hospital' is both client and target"),
        ({}, {"drop": ["outcome"]}, "'outcome' is both target and drop"),
        ({}, {"drop": "days"}, "a list of column names"),
        ({}, {"validation": 0.6, "test": 0.4}, "keep some for training"),
        ({}, {"task": "classify"}, "did you mean 'classification'"),
        ({}, {"target": "outcome", "task": "regression"}, "a regression needs numbers"),
        ({"when": pd.date_range("2024-01-01", periods=20)}, {}, "the type datetime64"),
        ({"odd": [[1]] * 20}, {}, "has a list"),
        ({"age": [np.inf] * 20}, {}, "infinite"),
        ({"outcome": ["ill"] * 20}, {}, "only one label"),
        ({"part": ["later"] * 20}, {"split": "part"}, "must be one of train, validation, test"),
    ],
)
def test_an_invalid_table_is_refused(change: dict[str, Any], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(cf.ComfedlError, match=message):
        cf.FederatedData.from_dataframe(
            FRAME.assign(**change), **{"client": "hospital", "target": "outcome", **arguments}
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n3\n", "Line 3 of bad.csv has 1 cells, but the header has 2"),
        ("a,a\n1,2\n", "occurs twice"),
        ("a,\n1,2\n", "of column 2 is empty"),
        ("a,b\n", "has no rows"),
    ],
)
def test_an_invalid_csv_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.csv").write_text(text)
    with pytest.raises(cf.DataError, match=message):
        read_csv(Path("bad.csv"))


# Torch Datasets.


class Squares(Dataset):
    def __init__(self, n: int, sample: Any = None) -> None:
        self.n, self.sample = n, sample

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        return self.sample or (torch.full((2, 3), float(i)), i % 2)


def test_datasets_become_clients() -> None:
    fed = cf.FederatedData.from_datasets({"a": Squares(20), "b": Squares(10)}, validation=0.2, test=None)
    assert fed.names == ("a", "b") and fed.test is None
    assert fed.train.x.shape[1:] == (2, 3) and len(fed.train["a"][1]) + len(fed.validation["a"][1]) == 20
    listed = cf.FederatedData.from_datasets([TensorDataset(torch.zeros(4, 2), torch.zeros(4))] * 11, 0.0, 0.0)
    assert listed.names[0] == "00" and listed.validation is None
    given = cf.FederatedData.from_datasets({"a": Squares(5)}, validation={"a": Squares(3)}, test=0.2)
    assert [len(given.train["a"][1]), len(given.validation["a"][1]), len(given.test["a"][1])] == [3, 3, 2]


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter([(torch.zeros(1), 0)])


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Squares(2, {"image": 1, "label": 2}), r"are a dict of 2, but a sample must be a pair \(x, y\)"),
        (Squares(2, (1, 2, 3)), "are a tuple of 3"),
        (Squares(2, ("picture", 1)), "not numbers"),
        (Squares(0), "no samples"),
        (Stream(), "give a map-style Dataset"),
    ],
)
def test_an_invalid_dataset_is_refused(dataset: Any, message: str) -> None:
    with pytest.raises(cf.DataError, match=message):
        cf.FederatedData.from_datasets({"a": dataset})


# Folders.


def test_one_csv_file_per_client(tmp_path: Path) -> None:
    for name, rows in FRAME.groupby("hospital"):
        rows.drop(columns="hospital").to_csv(tmp_path / f"{name}.csv", index=False)
    folder = cf.FederatedData.from_folder(tmp_path, target="outcome")
    table = cf.FederatedData.from_dataframe(FRAME, "hospital", "outcome")
    assert torch.equal(folder.train.x, table.train.x) and torch.equal(folder.train.y, table.train.y)
    assert folder.encoding is not None and folder.encoding.client is None
    (tmp_path / "west.csv").write_text("age,outcome\n3,ill\n")
    with pytest.raises(cf.DataError, match="differ in the column"):
        cf.FederatedData.from_folder(tmp_path, target="outcome")


@pytest.mark.parametrize("options", [{}, {"missing": "drop"}, {"na_values": [1]}, {"na_values": ["1", "train"]}])
@pytest.mark.parametrize("have_splits", [False, True])
def test_files_are_called_as_a_missing_value_is_written(
    tmp_path: Path, have_splits: bool, options: dict[str, Any]
) -> None:
    for name in ("1", "NA", "null"):
        for split in ("train", "test") if have_splits else ("",):
            file = tmp_path / name / f"{split}.csv" if split else tmp_path / f"{name}.csv"
            file.parent.mkdir(exist_ok=True)
            FRAME.drop(columns="hospital").to_csv(file, index=False)
    fed = cf.FederatedData.from_folder(tmp_path, target="outcome", **options)
    assert fed.names == ("1", "NA", "null") and sum(split_sizes(fed)) == 60 * (1 + have_splits)


def test_arrays_with_given_splits(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for k, split in enumerate(("train", "test")):
            np.savez(tmp_path / name / f"{split}.npz", x=np.full((3 + k, 2), k, dtype=np.float64), y=np.arange(3 + k))
    fed = cf.FederatedData.from_folder(tmp_path)
    assert split_sizes(fed) == [6, 0, 8] and fed.train.x.dtype == torch.float32
    np.savez(tmp_path / "c.npz", x=np.zeros((3, 2)), y=np.arange(3))
    with pytest.raises(cf.DataError, match="'c' does not"):
        cf.FederatedData.from_folder(tmp_path)


def test_a_pickle_in_an_npz_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.array([{}], dtype=object), y=np.zeros(1))
    with pytest.raises(cf.DataError, match="cannot be read"):
        cf.FederatedData.from_folder(tmp_path)


def test_images_in_one_folder_per_class(tmp_path: Path) -> None:
    from PIL import Image

    for client in ("x", "y"):
        for place, label in enumerate(("cat", "dog")):
            (tmp_path / client / label).mkdir(parents=True)
            for i in range(4):
                pixels = np.full((5, 6, 3), 51 * (place + 1), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / client / label / f"{i}.png")
    fed = cf.FederatedData.from_folder(tmp_path, validation=0.25, test=0.0)
    assert fed.train.x.shape[1:] == (3, 5, 6) and split_sizes(fed) == [12, 4, 0]
    x, y = fed.train["x"]
    assert torch.allclose(x[:, 0, 0, 0], 0.2 * (y + 1).float())
    assert fed.encoding is not None and fed.encoding.classes == ("cat", "dog")
    assert cf.FederatedData.from_folder(tmp_path, size=4).train.x.shape[1:] == (3, 4, 4)
    Image.fromarray(np.zeros((7, 6, 3), dtype=np.uint8)).save(tmp_path / "y" / "dog" / "odd.png")
    with pytest.raises(cf.DataError, match=r"odd.png has 7 x 6 pixels.*give size"):
        cf.FederatedData.from_folder(tmp_path)


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(cf.DataError, match=r"\.txt files, but it must have"):
        cf.FederatedData.from_folder(tmp_path)
    with pytest.raises(cf.DataError, match="There is no folder"):
        cf.FederatedData.from_folder(tmp_path / "nowhere")


# Hugging Face. Its library warns about objects that it cannot pickle for a dataset's fingerprint.

hugging = pytest.mark.filterwarnings("ignore")


@hugging
def test_hugging_face_tables_are_encoded_like_data_frames() -> None:
    datasets = pytest.importorskip("datasets", reason="needs the extra hf")
    table = cf.FederatedData.from_dataframe(FRAME, "hospital", "outcome")
    one = datasets.Dataset.from_pandas(FRAME)
    several = {
        name: datasets.Dataset.from_pandas(part, preserve_index=False) for name, part in FRAME.groupby("hospital")
    }
    inputs = ["age", "smoker", "ward", "days"]
    for fed in (
        cf.FederatedData.from_huggingface(one, y="outcome", client="hospital"),
        cf.FederatedData.from_huggingface(several, y="outcome", x=inputs),
    ):
        assert torch.equal(fed.train.x, table.train.x) and torch.equal(fed.train.y, table.train.y)
    parted = datasets.DatasetDict({"train": one, "test": one.select(range(10))})
    fed = cf.FederatedData.from_huggingface(parted, y="outcome", client="hospital")
    assert split_sizes(fed) == [20, 0, 10]


@hugging
def test_hugging_face_images_and_label_names() -> None:
    datasets = pytest.importorskip("datasets", reason="needs the extra hf")
    from PIL import Image

    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["zebra", "ape"])})
    pictures = [Image.fromarray(np.full((4, 5, 3), 51, dtype=np.uint8))] * 10
    one = datasets.Dataset.from_dict({"image": pictures, "label": [0, 1] * 5}, features=features)
    fed = cf.FederatedData.from_huggingface({"a": one, "b": one})
    assert fed.train.x.shape[1:] == (3, 4, 5) and float(fed.train.x[0, 0, 0, 0]) == pytest.approx(0.2)
    assert fed.encoding is not None and fed.encoding.classes == ("ape", "zebra")


@hugging
def test_the_partitions_of_a_flower_dataset_are_clients() -> None:
    """With a stub of flwr_datasets.FederatedDataset: partitioners by split, and load_partition."""
    datasets = pytest.importorskip("datasets", reason="needs the extra hf")
    loaded = []

    def load_partition(number: int, split: str) -> Any:
        loaded.append((number, split))
        return datasets.Dataset.from_dict({"x": [[float(number), 1.0]] * 8, "label": [0, 1] * 4})

    federated = SimpleNamespace(
        partitioners={"train": SimpleNamespace(num_partitions=3)}, load_partition=load_partition
    )
    fed = cf.FederatedData.from_huggingface(federated)
    assert fed.names == ("0", "1", "2") and loaded == [(0, "train"), (1, "train"), (2, "train")]
    assert fed.train["2"][0][0].tolist() == [2.0, 1.0]


def test_a_huggingface_dataset_needs_clients() -> None:
    data = SimpleNamespace(column_names=["a", "label"])
    with pytest.raises(cf.DataError, match="client is missing; name a column"):
        cf.FederatedData.from_huggingface(data)
    with pytest.raises(cf.DataError, match="no column 'site'"):
        cf.FederatedData.from_huggingface(data, client="site")
