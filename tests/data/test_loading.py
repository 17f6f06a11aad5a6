"""load(): disjoint splits, held-out samples in the client's label proportions, the time blocks of "watch"."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch

import comfedl as cf
from comfedl.data import loading
from comfedl.data.registry import SOURCES, RawData

PARTITIONS = [
    cf.partition.IID(clients=5),
    cf.partition.Imbalanced(clients=6, large=500, small=20),
    cf.partition.DominantClass(clients=10, rho=0.4),
    cf.partition.Dirichlet(clients=6, alpha=0.3),
    cf.partition.Shards(clients=8, classes=2),
]


def rows(split: cf.FederatedData | None) -> dict[str, list[int]]:
    """The rows of the data set that each client has."""
    return {
        name: split.rows[split.offsets[i] : split.offsets[i + 1]].tolist()
        for i, name in enumerate(split.names)
        if split.sizes[i]
    }


def shares(labels: torch.Tensor, classes: int = 10) -> np.ndarray:
    counts = np.bincount(labels.numpy(), minlength=classes)
    return counts / counts.sum()


@pytest.mark.parametrize("partition", PARTITIONS, ids=lambda p: type(p).__name__)
def test_no_sample_is_used_twice(partition: cf.partition.Partition) -> None:
    fed = cf.load("digits", partition, seed=3)
    parts = [part for split in (fed.train, fed.validation, fed.test) for part in rows(split).values()]
    assert len(parts) == 3 * len(fed)
    for one, other in combinations(parts, 2):
        assert not set(one) & set(other)
    used = np.concatenate(parts)
    assert len(used) == len(set(used)) and used.min() >= 0 and used.max() < 1797


@pytest.mark.parametrize("partition", PARTITIONS[2:], ids=lambda p: type(p).__name__)
def test_held_out_samples_have_the_clients_own_labels(partition: cf.partition.Partition) -> None:
    """In proportion, to within one sample per class; the same number for every client."""
    fed = cf.load("digits", partition, seed=3)
    for split in (fed.validation, fed.test):
        (size,) = set(split.sizes.tolist())
        for name in fed.names:
            own, held = shares(fed.train[name][1]), shares(split[name][1])
            assert np.abs(held - own).max() <= 1 / size + 1e-9, (name, size)
            assert (own[held > 0] > 0).all()


@pytest.mark.parametrize("partition", PARTITIONS[:2], ids=lambda p: type(p).__name__)
def test_under_uniform_draws_held_out_samples_have_the_overall_proportions(partition: cf.partition.Partition) -> None:
    """The proportions of twenty uniform draws are only a noisy estimate of the overall ones."""
    fed = cf.load("digits", partition, seed=3)
    pool = shares(fed.train.y)
    for split in (fed.validation, fed.test):
        size = int(split.sizes[0])
        for name in fed.names:
            assert np.abs(shares(split[name][1]) - pool).max() <= 1 / size + 0.01


def test_samples_are_unchanged() -> None:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    fed = cf.load("digits", PARTITIONS[3], seed=3)
    for split in (fed.train, fed.validation, fed.test):
        for name, places in rows(split).items():
            x, y = split[name]
            assert x.shape[1:] == (1, 8, 8) and x.dtype == torch.float32 and y.dtype == torch.int64
            np.testing.assert_allclose(x.flatten(1).numpy() * 16, images[places], atol=1e-5)
            assert y.tolist() == labels[places].tolist()


def test_the_seed_determines_the_split() -> None:
    one, two, three = (cf.load("digits", PARTITIONS[3], seed=seed) for seed in (1, 1, 2))
    for split in ("train", "validation", "test"):
        assert rows(one.split(split)) == rows(two.split(split)) != rows(three.split(split))


def test_the_shares_held_out() -> None:
    fed = cf.load("digits", cf.partition.IID(clients=4), validation=0.3, test=0.0)
    assert fed.test is None
    assert abs(int(fed.validation.sizes.sum()) / 1797 - 0.3) < 0.02
    assert abs(int(fed.train.sizes.sum()) / 1797 - 0.7) < 0.02
    both = cf.load("digits", cf.partition.IID(clients=4), validation=0.25, test=0.5)
    for split, share in (("train", 0.25), ("validation", 0.25), ("test", 0.5)):
        assert abs(int(both.split(split).sizes.sum()) / 1797 - share) < 0.02, split
    bare = cf.load("digits", cf.partition.IID(clients=4), validation=0, test=0)
    assert bare.validation is None and bare.test is None and int(bare.train.sizes.sum()) == 1797


def test_ten_equal_clients_by_default() -> None:
    fed = cf.load("digits")
    assert len(fed) == 10 and np.ptp(fed.train.sizes) <= 1


def test_clients_are_in_the_order_of_their_names() -> None:
    fed = cf.load("digits", cf.partition.IID(clients=12))
    assert list(fed.names) == sorted(fed.names) and len(fed.names) == 12


@pytest.mark.parametrize(
    "options",
    [
        {"partition": "iid"},
        {"validation": 1.0},
        {"validation": -0.1},
        {"test": "0.2"},
        {"test": True},
        {"validation": float("nan")},
        {"validation": 0.5, "test": 0.5},
    ],
)
def test_values_out_of_range(options: dict[str, object]) -> None:
    with pytest.raises(cf.ConfigError):
        cf.load("digits", **options)


def test_an_unknown_name() -> None:
    with pytest.raises(cf.ComfedlError, match="digits"):
        cf.load("digit")


# Synthetic data sets with a test set, or like "watch", so that nothing is downloaded.


def replace_data_set(monkeypatch: pytest.MonkeyPatch, raw: RawData) -> None:
    monkeypatch.setattr(loading, "read", lambda name, progress=False: raw)


def with_test_set() -> RawData:
    """The value of each sample is its row; those of the test set start at 1000."""
    x = np.arange(300, dtype=np.float32)[:, None]
    return RawData(x, np.arange(300) % 3, 3, test_x=1000 + x[:90], test_y=np.arange(90) % 3)


def test_the_test_set_is_the_test_split(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_data_set(monkeypatch, with_test_set())
    fed = cf.load("mnist", cf.partition.Dirichlet(clients=4, alpha=1.0), seed=1, test=0.2)
    for name in fed.names:
        assert float(fed.train[name][0].max()) < 1000 and float(fed.validation[name][0].max()) < 1000
        x, y = fed.test[name]
        assert float(x.min()) >= 1000
        assert ((x[:, 0].long() - 1000) % 3).tolist() == y.tolist()
        assert (fed.train[name][0][:, 0].long() % 3).tolist() == fed.train[name][1].tolist()
    held = int(fed.validation.sizes.sum())
    assert held <= 60 and int(fed.train.sizes.sum()) == 240
    assert cf.load("mnist", test=0).test is None


def watch() -> RawData:
    """Three people with two recordings each, five time blocks per recording, four windows per block."""
    people, blocks = np.repeat(["person-2", "person-0", "person-1"], 40), np.tile(np.repeat(np.arange(5), 4), 6)
    x = np.arange(120, dtype=np.float32).reshape(120, 1, 1) * np.ones((1, 6, 5), dtype=np.float32)
    return RawData(x, np.arange(120) % 4, 4, groups={"person": people}, blocks=blocks)


def test_watch_is_split_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks 0 to 2 are train, 3 is validation, 4 is test; each person is a client."""
    raw = watch()
    replace_data_set(monkeypatch, raw)
    for partition in (None, cf.partition.Natural()):
        fed = cf.load("watch", partition)
        assert list(fed.names) == ["person-0", "person-1", "person-2"]
        for split, blocks in (("train", {0, 1, 2}), ("validation", {3}), ("test", {4})):
            for name in fed.names:
                x, y = fed.split(split)[name]
                places = x[:, 0, 0].long().numpy()
                assert set(raw.blocks[places]) == blocks and set(raw.groups["person"][places]) == {name}
                assert (raw.y[places] == y.numpy()).all() and len(y) == 8 * len(blocks)


def test_watch_under_another_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Partitioned by label like any other data set, whoever the person is."""
    replace_data_set(monkeypatch, watch())
    fed = cf.load("watch", cf.partition.IID(clients=3), seed=1)
    seen = [x[:, 0, 0].long().tolist() for split in (fed.train, fed.validation, fed.test) for x, _ in split.values()]
    flat = [place for places in seen for place in places]
    assert list(fed.names) == ["client-0", "client-1", "client-2"] and len(flat) == len(set(flat))


def test_natural_needs_groups() -> None:
    with pytest.raises(cf.DataError, match="group"):
        cf.load("digits", cf.partition.Natural())


def test_a_person_without_train_data_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """All windows of one person are in the last block: the error names the client."""
    raw = watch()
    blocks = np.where(raw.groups["person"] == "person-1", 4, raw.blocks)
    replace_data_set(monkeypatch, RawData(raw.x, raw.y, raw.classes, groups=raw.groups, blocks=blocks))
    with pytest.raises(cf.DataError, match="person-1"):
        cf.load("watch")


def test_loaded_data_can_be_trained_on() -> None:
    fed = cf.load("digits", PARTITIONS[3], seed=3)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    result = cf.fit(model, fed, cf.ComFedL(outer=cf.KL(0.2), lr=0.5), rounds=5)
    first, last = result.rounds[0], result.rounds[-1]
    assert last["objective"] < first["objective"]
    for split in ("train", "validation", "test"):
        assert last[f"{split}.loss.mean"] < first[f"{split}.loss.mean"]


def test_held_out_sets_the_number_of_held_out_samples() -> None:
    fed = cf.load("digits", cf.partition.DominantClass(clients=10, rho=0.4), seed=3, held_out=10)
    whole = cf.load("digits", cf.partition.DominantClass(clients=10, rho=0.4), seed=3)
    assert rows(fed.train) == rows(whole.train)
    for split in (fed.validation, fed.test):
        assert split is not None and split.sizes.tolist() == [10] * 10
        for i, name in enumerate(split.names):
            assert (split[name][1] == i).sum() == 4
    assert not {row for held in rows(fed.validation).values() for row in held} & {
        row for held in rows(fed.test).values() for row in held
    }
    for wrong, message in ((0, "held_out.*0"), (10_000, "10000 each")):
        with pytest.raises((cf.ConfigError, cf.DataError), match=message):
            cf.load("digits", cf.partition.IID(clients=10), held_out=wrong)


# Natural clients with their own held-out rows, like "adult" (with a test set) and "flights" (without).


def natural(test: bool = True) -> RawData:
    """Groups of 100, 20, 3, 2 and 1 rows, and 4 rows without one; x is the row, and those of the test set are negative.

    Labels are 80 % 0. The group "gone" has test rows only, and "e" has none.
    """
    site = np.array([""] * 4 + ["a"] * 100 + ["b"] * 20 + ["c"] * 3 + ["d"] * 2 + ["e"])
    site = np.random.default_rng(0).permutation(site)
    y = np.zeros(130, dtype=np.int64)
    for group in "ab":
        y[np.flatnonzero(site == group)[::5]] = 1
    x = np.arange(1, 131, dtype=np.float32)[:, None]
    half = np.where(x[:, 0] % 2 > 0, "odd", "even")
    raw = RawData(x, y, 2, groups={"site": site, "half": half})
    if not test:
        return raw
    test_site = np.array(["a"] * 10 + ["b", "c", "d", "gone", ""])
    test_x, test_y = -np.arange(1, 16, dtype=np.float32)[:, None], np.arange(15) % 2
    test_groups = {"site": test_site, "half": np.array(["odd"] * 15)}
    return replace(raw, test_x=test_x, test_y=test_y, test_groups=test_groups)


def sizes(fed: cf.FederatedData, split: str) -> dict[str, int]:
    return {name: len(part) for name, part in rows(fed.split(split)).items()}


@pytest.mark.parametrize("test", [True, False])
def test_held_out_rows_of_natural_clients_are_their_own(test: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = natural(test)
    replace_data_set(monkeypatch, raw)
    fed = cf.load("adult")
    assert list(fed.names) == list("abcde")
    seen = []
    for split in ("train", "validation", "test"):
        for name, places in rows(fed.split(split)).items():
            x, y = fed.split(split)[name]
            own = places if split != "test" or not test else [place - 130 for place in places]
            groups = (raw.test_groups if split == "test" and test else raw.groups)["site"]
            assert set(groups[own]) == {name} and (x[:, 0] < 0).all() == (split == "test" and test)
            assert (y.numpy() == (raw.test_y if split == "test" and test else raw.y)[own]).all()
            seen += places
    assert len(seen) == len(set(seen)) == 126 + (13 if test else 0)
    if test:
        assert sizes(fed, "train") == {"a": 80, "b": 16, "c": 2, "d": 1, "e": 1}
        assert sizes(fed, "validation") == {"a": 20, "b": 4, "c": 1, "d": 1}
        assert sizes(fed, "test") == {"a": 10, "b": 1, "c": 1, "d": 1}
    else:
        assert sizes(fed, "train") == {"a": 60, "b": 12, "c": 1, "d": 1, "e": 1}
        assert sizes(fed, "validation") == {"a": 20, "b": 4, "c": 1, "d": 1}
        assert sizes(fed, "test") == {"a": 20, "b": 4, "c": 1}
    for name, share in (("a", 0.2), ("b", 0.2)):
        for split in ("train", "validation") if test else ("train", "validation", "test"):
            y = fed.split(split)[name][1].float()
            assert abs(float(y.sum()) - share * len(y)) < 1


def test_a_grouping_is_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_data_set(monkeypatch, natural())
    fed = cf.load("adult", cf.partition.Natural(by="half"))
    assert sizes(fed, "train") == {"even": 52, "odd": 52} and sizes(fed, "test") == {"odd": 15}
    assert rows(cf.load("adult", cf.partition.Natural(by="site")).train) == rows(cf.load("adult").train)


def test_a_grouping_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_data_set(monkeypatch, natural())
    with pytest.raises(cf.ConfigError, match=r"`by` is 'sites', which is no grouping of 'adult'; .*'site'"):
        cf.load("adult", cf.partition.Natural(by="sites"))
    replace_data_set(monkeypatch, watch())
    assert len(cf.load("watch", cf.partition.Natural(by="person"))) == 3
    with pytest.raises(cf.ConfigError, match="'watch' has only the grouping 'person'; leave `by` out"):
        cf.load("watch", cf.partition.Natural(by="phd"))
    for wrong in ("", 3, ["phd"]):
        with pytest.raises(cf.ConfigError, match=r"`by` is .*name of a grouping"):
            cf.partition.Natural(by=wrong)


def test_shares_and_held_out_of_natural_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_data_set(monkeypatch, natural(test=False))
    whole, limited = cf.load("flights"), cf.load("flights", held_out=10)
    assert rows(limited.train) == rows(whole.train)
    for split in ("validation", "test"):
        assert sizes(limited, split) == {name: min(size, 10) for name, size in sizes(whole, split).items()}
        assert float(limited.split(split)["a"][1].sum()) == 2
        for name, places in rows(limited.split(split)).items():
            assert set(places) <= set(rows(whole.split(split))[name])
    bare = cf.load("flights", validation=0, test=0)
    assert bare.validation is None and bare.test is None and int(bare.train.sizes.sum()) == 126
    assert cf.load("flights", test=0).test is None
    most = cf.load("flights", validation=0.5, test=0.45)
    assert int(most.train.sizes.min()) == 1 and sizes(most, "train")["a"] == 5
    with pytest.raises(cf.ConfigError, match="keep some for training"):
        cf.load("flights", validation=0.5, test=0.5)
    replace_data_set(monkeypatch, natural())
    assert cf.load("adult", test=0).test is None
    again = cf.load("adult", seed=4)
    assert rows(again.train) == rows(cf.load("adult", seed=4).train) != rows(cf.load("adult", seed=5).train)


def test_natural_data_under_another_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_data_set(monkeypatch, natural())
    fed = cf.load("adult", cf.partition.IID(clients=3))
    assert int(fed.train.sizes.sum()) == 104 and len(set(fed.test.sizes.tolist())) == 1


# Some of the classes.


def test_classes_are_kept_and_numbered_in_the_given_order(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_data_set(monkeypatch, with_test_set())
    fed = cf.load("mnist", cf.partition.Shards(clients=2, classes=1), classes=[2, 0])
    for split in (fed.train, fed.validation, fed.test):
        for name in fed.names:
            x, y = split[name]
            assert len(set(y.tolist())) == 1 and len(y) > 0
            assert (torch.tensor([2, 0])[y] == x[:, 0].long() % 1000 % 3).all()
    assert int(fed.train.sizes.sum()) == 160
    every = cf.load("mnist", cf.partition.IID(clients=2), classes=range(3))
    assert torch.equal(every.train.y, cf.load("mnist", cf.partition.IID(clients=2)).train.y)


def test_classes_of_natural_data(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_data_set(monkeypatch, watch())
    fed = cf.load("watch", classes=[3, 1])
    assert len(fed) == 3 and int(fed.train.sizes.sum()) == 36
    x, y = fed.train["person-0"]
    assert ((x[:, 0, 0].long() % 4 == 3) == (y == 0)).all()
    raw = natural()
    replace_data_set(monkeypatch, replace(raw, classes=3))
    assert rows(cf.load("adult", classes=[0, 1]).test) == rows(cf.load("adult").test)


@pytest.mark.parametrize("classes", [[], [1], [0, 0], [0, 3], [-1, 0], [0, 1.0], [True, False], "01", 2, {0: 1}])
def test_classes_that_are_not_there(classes: object, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_data_set(monkeypatch, with_test_set())
    with pytest.raises(
        cf.ConfigError, match=r"`classes` is .*, but the labels of 'mnist' are 0 to 2; give two or more"
    ):
        cf.load("mnist", classes=classes)


@pytest.mark.download
@pytest.mark.parametrize(
    ("name", "by", "clients", "sizes"),
    [
        ("adult", "phd", 2, {"phd": (330, 83, 181), "non-phd": (25718, 6430, 16100)}),
        ("adult", None, 14, {"Armed-Forces": (7, 2, 6), "Prof-specialty": (3312, 828, 2032)}),
        ("adult", "native-country", 41, {"Holand-Netherlands": (1, 0, 0)}),
        ("flights", None, 16, {"OO": (17, 6, 6), "UA": (34670, 11556, 11556)}),
        ("flights", "origin", 3, {}),
        ("shakespeare", None, 36, {}),
        ("shakespeare", "speaker", 1012, {}),
    ],
)
def test_natural_clients_of_the_real_data(
    name: str, by: str | None, clients: int, sizes: dict[str, tuple[int, ...]]
) -> None:
    try:
        fed = cf.load(name, cf.partition.Natural(by=by))
    except cf.DataError as error:
        pytest.skip(f"{name} is not in the cache and cannot be downloaded: {error}")
    assert len(fed) == clients
    for client, expected in sizes.items():
        i = fed.names.index(client)
        assert tuple(int(split.sizes[i]) for split in (fed.train, fed.validation, fed.test)) == expected
    data = SOURCES[name]
    if data.dtype == "int64":  # ids, which these models do not take
        return
    for model in ("logistic", "mlp"):
        net = cf.models.build(model, data.shape, data.classes, seed=0)
        result = cf.fit(net, fed, cf.ComFedL(outer=cf.KL(0.5), lr=0.1, batch_size=50), rounds=5)
        first, last = result.rounds[0], result.rounds[-1]
        assert last["validation.loss.mean"] < first["validation.loss.mean"]
