"""Data on disk: what is read when, how much of it is in memory, and what is refused in a sentence."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import comfedl as cf
from comfedl.data.client_cache import ClientCache
from comfedl.data.lazy_split import placed
from comfedl.data.stored_array import of_memmap
from comfedl.engines.read_ahead import ReadAhead
from helpers.on_disk import CLASSES, FORMS, NAMES, SIZES, WIDTH, Stored, arrays, mapped
from helpers.ranks import forked

Data = cf.FederatedData


def linear() -> torch.nn.Module:
    return torch.nn.Linear(WIDTH, CLASSES)


def train(fed: cf.FederatedData, **options: Any) -> cf.Result:
    return cf.fit(linear(), fed, cf.FedAvg(lr=0.1, batch_size=4, local_steps=2), **{"rounds": 1, **options})


@pytest.mark.parametrize("rows", [[3], [0, 1, 2], [5, 2, 2, 9], [985, 0, 400], []])
def test_rows_are_read_by_their_place(rows: list[int], tmp_path: Path) -> None:
    whole = np.random.default_rng(0).normal(size=(1000, 3, 2)).astype(np.float32)
    array = of_memmap("x", mapped(tmp_path, "x", whole)[10:])
    assert array is not None and len(array) == 990
    found = array.read(4, np.array(rows, dtype=np.int64), "Client 'a'")
    assert torch.equal(found, torch.from_numpy(whole[14:])[rows])


def test_what_is_no_whole_array_of_a_file_is_refused(tmp_path: Path) -> None:
    x, y = np.ones((6, 2), dtype=np.float32), np.zeros(6)
    stored = mapped(tmp_path, "x", x)
    for given in (stored[::2], mapped(tmp_path, "big", x.astype(">f4"))[::2]):
        with pytest.raises(cf.DataError, match="give whole rows of an array in C order"):
            Data({"a": (given, y[: len(given)])}, lazy=True)
    with pytest.raises(cf.DataError, match=r'mapped copy-on-write.*open it with mmap_mode="r"'):
        Data({"a": (np.load(tmp_path / "x.npy", mmap_mode="c"), y)}, lazy=True)


def test_arguments(tmp_path: Path) -> None:
    x, y = mapped(tmp_path, "x", np.ones((6, 2), dtype=np.float32)), np.zeros(6, dtype=int)
    with pytest.raises(cf.ConfigError, match="memory_mb is given, but the data are read into memory"):
        Data({"a": (x, y)}, memory_mb=3)
    with pytest.raises(cf.ConfigError, match="lazy is 'yes', but it must be true or false"):
        Data({"a": (x, y)}, lazy="yes")  # type: ignore[arg-type]
    with pytest.raises(cf.ConfigError, match="memory_mb"):
        Data({"a": (x, y)}, lazy=True, memory_mb=0)
    fed = Data({"a": (x, y)}, lazy=True)
    with pytest.raises(cf.DataError, match=r'there is no x of all clients; ask for .* fed.train\["a"\]'):
        fed.train.x  # noqa: B018
    for bad, words in (
        ({"a": (x, y[:5])}, "'a' has 6 samples in x but 5 in y"),
        ({"a": ({"x": x, "z": x[:4]}, y)}, "6 samples at 'x'|4 samples at 'z'"),
        ({}, "train has no clients"),
    ):
        with pytest.raises(cf.DataError, match=words):
            Data(bad, lazy=True)
    with pytest.raises(cf.DataError, match="'b' is in validation but not in train"):
        Data({"a": (x, y)}, {"b": (x, y)}, lazy=True)
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "a.csv").write_text("u,y\n1,0\n2,1\n3,0\n4,1\n")
    for make in (
        lambda: Data.from_folder(tmp_path / "t", target="y", lazy=True),
        lambda: Data.from_csv(tmp_path / "t" / "a.csv", "u", "y", lazy=True),
    ):
        with pytest.raises(cf.DataError, match=r"a.csv is read whole, .* write the table as Parquet"):
            make()


def test_a_client_that_is_too_large_is_named(tmp_path: Path) -> None:
    x = mapped(tmp_path, "x", np.zeros((1000, 100), dtype=np.float32))
    y = np.zeros(1000, dtype=np.int64)
    with pytest.raises(
        cf.DataError, match=r"'1' has 0.3264 MB of samples, but memory_mb is 0.5, .* give memory_mb = 1 "
    ):
        Data.from_flat((x, y, [0, 200, 1000]), lazy=True, memory_mb=0.5)
    assert Data.from_flat((x, y, [0, 200, 1000]), lazy=True, memory_mb=0.66).train.sizes.tolist() == [200, 800]


def broken(client: str, change: Any) -> dict[str, tuple[Any, Any]]:
    own = arrays()
    x, y = own[client][0].copy(), own[client][1].copy()
    change(x, y)
    return {**own, client: (x, y)}


def test_a_client_is_checked_when_it_is_read(tmp_path: Path) -> None:
    def nan(x: Any, y: Any) -> None:
        x[:, 1] = np.nan

    def label(x: Any, y: Any) -> None:
        y[:] = CLASSES

    for k, (change, words) in enumerate(
        (
            (nan, r"Client 'eva' has \d+ NaN or infinite values in x of train; replace"),
            (label, "Client 'eva' has the label 3 in train, but the model has 3 outputs"),
        )
    ):
        folder = tmp_path / str(k)
        folder.mkdir()
        for name, (x, y) in broken("eva", change).items():
            np.savez(folder / f"{name}.npz", x=x, y=y)
        fed = Data.from_folder(folder, validation=0, test=0, lazy=True)
        for engine in ({"vectorize": "serial"}, {"vectorize": "stack"}):
            with pytest.raises(cf.DataError, match=words):
                train(fed, engine_options=engine)
    np.savez(tmp_path / "0" / "eva.npz", x=np.ones((4, WIDTH + 1), dtype=np.float32), y=np.zeros(4, dtype=int))
    with pytest.raises(cf.DataError, match=r"'eva' has x samples of shape \(6,\) in train but client 'ann' has \(5,\)"):
        train(Data.from_folder(tmp_path / "0", validation=0, test=0, lazy=True))


def test_two_classes_are_checked_too(tmp_path: Path) -> None:
    own = {name: (x, np.minimum(y, 1)) for name, (x, y) in arrays().items()}
    own["dee"] = own["dee"][0], np.full(20, 2)
    for name, (x, y) in own.items():
        np.savez(tmp_path / f"{name}.npz", x=x, y=y)
    with pytest.raises(cf.DataError, match="bce needs labels that are 0 or 1, but client 'dee' in train has 2"):
        cf.fit(torch.nn.Linear(WIDTH, 1), Data.from_folder(tmp_path, lazy=True), cf.FedAvg(lr=0.1), 1, loss="bce")


@pytest.mark.parametrize("form", ["flat_arrays", "npz", "packed_npz", "parquet", "datasets"])
def test_a_second_run_checks_what_the_first_has_read(form: str, tmp_path: Path) -> None:
    """The runs on a federation share what is kept in memory, but not what they check."""
    _, fed = FORMS[form](tmp_path, 100)
    wide = torch.nn.Linear(fed.train.shape[0], 1)
    cf.fit(wide, fed, cf.FedAvg(lr=0.1), 1, loss="mse", eval_every=1)
    with pytest.raises(cf.DataError, match=r"bce needs labels that are 0 or 1, but client .* has 2"):
        cf.fit(wide, fed, cf.FedAvg(lr=0.1), 1, loss="bce", eval_every=1)
    for engine in ({"vectorize": "serial"}, {"vectorize": "stack"}):
        with pytest.raises(cf.DataError, match=r"has the label 2 in .*, but the model has 2 outputs"):
            narrow = torch.nn.Linear(fed.train.shape[0], 2)
            cf.fit(narrow, fed, cf.FedAvg(lr=0.1), 1, eval_every=1, engine_options=engine)


def test_a_client_without_a_target_that_counts(tmp_path: Path) -> None:
    """It is refused where all of its samples are read."""
    own = broken("eva", lambda x, y: y.fill(-100))
    for name, (x, y) in own.items():
        np.savez(tmp_path / f"{name}.npz", x=x, y=y)
    fed = Data.from_folder(tmp_path, validation=0, test=0, lazy=True)
    with pytest.raises(cf.DataError, match="No target of client 'eva' in train counts"):
        train(fed, loss=torch.nn.CrossEntropyLoss(ignore_index=-100), eval_every=1)


def test_balanced_weights_count_the_labels_that_were_set_aside(tmp_path: Path) -> None:
    """As they do in memory, where the y of both are one tensor."""
    from comfedl.data.outer_share import set_aside

    for fed in FORMS["npz"](tmp_path, 0.1):
        kept = set_aside(fed, 0.4, 0)
        count = len(fed.train.all_y())
        assert int(kept.train.sizes.sum()) < count
        assert len(kept.train.all_y()) == count
        assert kept.train.to(torch.float64, torch.device("cpu")).all_y().bincount().tolist() == (
            fed.train.all_y().bincount().tolist()
        )


@pytest.mark.parametrize("form", ["flat_arrays", "npz", "packed_npz", "safetensors", "images", "parquet_folder"])
@pytest.mark.parametrize("what", ["changes", "vanishes", "is cut off"])
def test_a_file_that_does_not_stay(form: str, what: str, tmp_path: Path) -> None:
    _, fed = FORMS[form](tmp_path, 0.1)
    for path in sorted(tmp_path.rglob("*")):
        if not path.is_file():
            continue
        if what == "changes":
            os.utime(path, ns=(1, 1))
        elif what == "vanishes":
            path.unlink()
        else:
            os.truncate(path, path.stat().st_size // 2)
    words = "cannot be read any more" if what == "vanishes" else "has changed since the data were opened"
    with pytest.raises(cf.DataError, match=rf"^Client '\w+' in \w+ {'' if what == 'vanishes' else 'cannot'}.*{words}"):
        for split in (fed.train, fed.validation):
            assert split is not None
            split[NAMES[3]]


def test_only_the_participants_are_read() -> None:
    own = {name: Stored(torch.from_numpy(x), torch.from_numpy(y)) for name, (x, y) in arrays().items()}
    fed = Data.from_datasets(own, None, None, lazy=True)
    assert [dataset.asked for dataset in own.values()][1:] == [0] * 5 and own["ann"].asked <= 5  # two, and looks
    result = train(fed, clients_per_round=2, eval_clients=1, save_personal=False)
    took_part = {str(row["client"]) for row in result.clients} | {"ann"}
    asked = {name for name, dataset in own.items() if dataset.asked}
    assert took_part <= asked and len(asked) <= 4  # two that train, one that is evaluated, and the first


def test_a_few_samples_of_a_client_are_read_alone() -> None:
    own = {name: Stored(torch.from_numpy(x), torch.from_numpy(y)) for name, (x, y) in arrays().items()}
    fed = Data.from_datasets(own, None, None, lazy=True)
    before = own["cid"].asked
    fed.train.take(2, np.array([5, 3, 5]))
    assert own["cid"].asked - before == 2 + 2  # the two distinct ones, and both once more to see if they are random


def test_a_rank_reads_its_own_clients_alone() -> None:
    def on_rank(rank: int) -> Any:
        own = {name: Stored(torch.from_numpy(x), torch.from_numpy(y)) for name, (x, y) in arrays().items()}
        fed = Data.from_datasets(own, None, None, lazy=True)
        result = train(fed, engine="distributed", rounds=2, eval_every=1)
        result.clients_table()
        return {name for name, dataset in own.items() if dataset.asked} - {"ann"}

    found = forked(2, on_rank)
    assert found[0] and found[1] and not found[0] & found[1] and found[0] | found[1] == {*NAMES[1:]}


class Failing(Stored):
    def __getitem__(self, k: int) -> Any:
        if k == 7:
            raise OSError("the disk is gone")
        return super().__getitem__(k)


class Random(Stored):
    def __getitem__(self, k: int) -> Any:
        return super().__getitem__(k)[0] + torch.rand(()), self.y[k]


def test_datasets_that_misbehave() -> None:
    own = arrays()
    bad = {name: (Failing if name == "cid" else Stored)(torch.from_numpy(x), y) for name, (x, y) in own.items()}
    with pytest.raises(
        cf.DataError, match="'cid' in train cannot be read: sample 7 of its Failing raised OSError: the d"
    ):
        train(Data.from_datasets(bad, None, None, lazy=True), eval_every=1)
    noisy = {name: (Random if name == "cid" else Stored)(torch.from_numpy(x), y) for name, (x, y) in own.items()}
    fed = Data.from_datasets(noisy, None, None, lazy=True)
    with pytest.warns(UserWarning, match="Client 'cid' in train has random samples") as seen:
        train(fed, rounds=2)
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(Data.from_datasets({name: Stored(torch.from_numpy(x), y) for name, (x, y) in own.items()}, lazy=True))
    with pytest.raises(cf.DataError, match="'ann' in train is a set; give a map-style Dataset"):
        Data.from_datasets({"ann": {1}}, lazy=True)


class Seeds(Stored):
    """Draws random numbers, but the same ones for a sample every time."""

    def __getitem__(self, k: int) -> Any:
        torch.manual_seed(k)
        x, y = super().__getitem__(k)
        return x + torch.rand(()), y


class Draws(torch.nn.Module):
    """A model that torch's kernels for stacked clients do not know."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.inner, self.rate = linear(), rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(torch.nn.functional.dropout(x, self.rate, self.training))
        return out


@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.parametrize("kind", [Stored, Seeds])
def test_reading_and_the_noise_of_training_do_not_disturb_each_other(kind: Any, rate: float) -> None:
    """A Dataset that draws numbers is read by the thread that trains: the model is that of the data in memory."""
    own = {name: kind(torch.from_numpy(x), torch.from_numpy(y)) for name, (x, y) in arrays().items()}
    options: dict[str, Any] = {"rounds": 4, "eval_every": 1, "engine_options": {"workers": 3, "vectorize": "serial"}}
    model = Draws(rate)
    memory, *disk = [
        cf.fit(model, Data.from_datasets(own, None, None, lazy=lazy, memory_mb=mb), cf.FedAvg(lr=0.1), **options)
        for lazy, mb in ((False, None), (True, 0.1), (True, 0.1))
    ]
    for one in disk:
        assert all(torch.equal(part, one.params[name]) for name, part in memory.params.items())


@pytest.mark.parametrize("kind", [Random, type("Later", (Random,), {"__getitem__": lambda self, k: (
    (Random if k > 5 else Stored).__getitem__(self, k)
)})])  # fmt: skip
def test_a_random_dataset_is_warned_of_and_no_more(kind: Any) -> None:
    """Also where its samples are not random until later, so that clients run on threads."""
    own = {name: kind(torch.from_numpy(x), torch.from_numpy(y)) for name, (x, y) in arrays().items()}
    with pytest.warns(UserWarning, match="random samples|Random numbers were drawn"):
        fed = Data.from_datasets(own, None, None, lazy=True, memory_mb=0.1)
        cf.fit(Draws(0.0), fed, cf.FedAvg(lr=0.1), 3, eval_every=1, engine_options={"workers": 3})


def test_what_is_kept_stays_within_the_bound() -> None:
    cache, read = ClientCache(0.008), []  # room for a thousand numbers of four bytes

    def get(name: str, size: int) -> Tensor:
        def make() -> Tensor:
            read.append(name)
            return torch.zeros(size)

        found: Tensor = cache.get_or_read(name, make)
        return found

    for name in "abcab":
        get(name, 400)
    assert read == [*"abcab"]  # two fit; the least recently used one goes
    get("b", 400)
    get("a", 400)
    get("c", 400)
    assert read == [*"abcabc"] and cache.get("b") is None
    get("huge", 2000)
    assert cache.get("huge") is None and cache.get("a") is not None
    assert pickle.loads(pickle.dumps(cache)).bound == cache.bound


def test_reading_ahead_is_bounded_and_in_order() -> None:
    begun, go = [], threading.Event()

    def read(k: int) -> int:
        begun.append(k)
        go.wait(10)
        return 10 * k

    go.set()
    with ReadAhead(read, [4] * 20, bound=12) as ahead:
        for k in range(20):
            assert ahead.take(k) == 10 * k
            assert len(begun) <= k + 3  # this one and two more
            ahead.done(k)
    begun.clear()
    with ReadAhead(read, [100] * 5, bound=12) as ahead:
        assert ahead.take(0) == 0
    assert len(begun) <= 2  # always the next one


def test_a_failure_ends_the_reading() -> None:
    def read(k: int) -> int:
        if k == 1:
            raise cf.DataError("gone")
        return k

    before = threading.active_count()
    with pytest.raises(cf.DataError, match="gone"), ReadAhead(read, [1] * 5, bound=100) as ahead:
        ahead.take(0)
        ahead.take(1)
    assert threading.active_count() == before


def test_samples_lie_in_memory_as_those_of_all_clients_would() -> None:
    whole = torch.randn(50, 7)
    for start in (0, 3, 16, 33):
        part = placed([whole[start : start + 5].clone(), whole[start + 5 : start + 9].clone()], start)
        assert torch.equal(part, whole[start : start + 9])
        assert part.data_ptr() % 64 == (whole.data_ptr() + 28 * start) % 64 if whole.data_ptr() % 64 == 0 else True


def test_row_groups_that_clients_share_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import pyarrow as pa
    from pyarrow import parquet as pq

    count = 400
    columns = {"site": [f"s{k % 20:02d}" for k in range(count)], "u": np.arange(count) * 1.0, "y": np.arange(count) % 2}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    Data.from_csv(tmp_path / "t.parquet", "site", "y", lazy=True)
    assert "reads the file 20 times; sort the rows by client" in caplog.text


MEMORY = """
import resource, sys
import numpy as np, torch, comfedl as cf
folder = sys.argv[1]
x, y = (np.load(f"{folder}/{name}.npy", mmap_mode="r") for name in "xy")
model = torch.nn.Linear(x.shape[1], 2)
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
cf.fit(model, cf.FederatedData({"a": (np.ones((9, x.shape[1]), np.float32), np.arange(9) % 2)}), cf.Robust(lr=.1), 1)
before = peak()
fed = cf.FederatedData.from_flat((x, y, np.arange(101) * (len(y) // 100)), lazy=True, memory_mb=40)
cf.fit(model, fed, cf.Robust(lr=0.01), rounds=2, clients_per_round=30, eval_every=2, engine_options={"memory_mb": 40})
print(peak() - before)
"""


def test_peak_memory_of_a_run_is_that_of_a_few_clients(tmp_path: Path) -> None:
    """A federation of 800 MB, of which all clients are evaluated; pages that are mapped would count."""
    np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", dtype=np.float32, shape=(100_000, 2000))
    np.save(tmp_path / "y.npy", np.arange(100_000) % 2)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 200


def test_a_federation_on_disk_travels_to_another_process(tmp_path: Path) -> None:
    for form in ("flat_arrays", "npz", "images", "dict_datasets"):
        (tmp_path / form).mkdir()
        memory, disk = FORMS[form](tmp_path / form, 0.1)
        assert disk.train["bob"][1].tolist() == pickle.loads(pickle.dumps(disk)).train["bob"][1].tolist()
        assert len(memory) == len(SIZES)


def test_only_a_few_bytes_identify_it(tmp_path: Path) -> None:
    _, fed = FORMS["npz"](tmp_path, 0.1)
    assert sum(part.nbytes for part in fed.contents() if isinstance(part, Tensor)) <= 8 * sum(SIZES)
