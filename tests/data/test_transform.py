"""Transforms of training batches: each one's definition, and who gets them."""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import comfedl as cf
from comfedl.config.schema import parse_config, run_config
from comfedl.data.transform import TRANSFORMS, apply
from helpers.inputs import CASES, F64, federated, rolled
from helpers.stopped import StopAt, files

SEED = 11
IMAGES = torch.rand(40, 2, 6, 5, generator=torch.Generator().manual_seed(0)) + 1


def changed(transform: Any, x: Any, seed: int = SEED) -> Any:
    return apply([transform], x, seed)


# The transforms of ours.


def test_a_crop_is_a_window_of_the_padded_image() -> None:
    found = changed(cf.transform.Crop(2), IMAGES)
    padded = nn.functional.pad(IMAGES, (2, 2, 2, 2))
    places: Counter[tuple[int, int]] = Counter()
    for before, after in zip(padded, found, strict=True):
        windows = {(i, j): before[:, i : i + 6, j : j + 5] for i in range(5) for j in range(5)}
        (place,) = [place for place, window in windows.items() if torch.equal(window, after)]
        places[place] += 1
    assert len(places) > 10 and {i for i, _ in places} == {j for _, j in places} == set(range(5))
    assert found.shape == IMAGES.shape and found.dtype == IMAGES.dtype


def test_a_flip_mirrors_some_images() -> None:
    found = changed(cf.transform.Flip(), IMAGES)
    same = [torch.equal(before, after) for before, after in zip(IMAGES, found, strict=True)]
    mirrored = [torch.equal(before.flip(2), after) for before, after in zip(IMAGES, found, strict=True)]
    assert [a != b for a, b in zip(same, mirrored, strict=True)] == [True] * 40 and 10 < sum(same) < 30
    assert torch.equal(changed(cf.transform.Flip(0.0), IMAGES), IMAGES)
    assert torch.equal(changed(cf.transform.Flip(1.0), IMAGES), IMAGES.flip(3))


@pytest.mark.parametrize("size", [1, 2, 3, 20])
def test_cutout_removes_a_square(size: int) -> None:
    """It is cut where it reaches over the border, and holds its centre always."""
    found = changed(cf.transform.Cutout(size), IMAGES)
    gone = found == 0
    assert torch.equal(gone[:, 0], gone[:, 1]) and torch.equal(found[~gone], IMAGES[~gone])
    for hole in gone[:, 0]:
        rows, columns = hole.any(dim=1), hole.any(dim=0)
        assert torch.equal(hole, rows[:, None] & columns)  # a rectangle
        assert 1 <= int(rows.sum()) <= size and 1 <= int(columns.sum()) <= size
        assert int((rows[1:] != rows[:-1]).sum()) <= 2  # in one piece
    assert size > 5 or len({tuple(map(tuple, hole.nonzero().tolist())) for hole in gone[:, 0]}) > 5


def test_noise_and_masks_have_their_size() -> None:
    table = torch.ones(4000, 3)
    noise = changed(cf.transform.Noise(0.5), table) - table
    assert float(noise.std()) == pytest.approx(0.5, rel=0.03) and abs(float(noise.mean())) < 0.02
    masked = changed(cf.transform.Mask(0.2, value=-1.0), table)
    assert set(masked.unique().tolist()) == {-1.0, 1.0}
    assert float((masked == -1).double().mean()) == pytest.approx(0.2, abs=0.02)
    assert float((masked == -1).all(dim=1).double().mean()) < 0.03  # cell by cell, not row by row


@pytest.mark.parametrize("transform", [cf.transform.Crop(2), cf.transform.Flip(), cf.transform.Cutout(3)])
def test_samples_are_changed_one_by_one_and_the_input_is_kept(transform: Any) -> None:
    before = IMAGES.clone()
    found = changed(transform, IMAGES)
    assert torch.equal(IMAGES, before) and torch.equal(changed(transform, IMAGES), found)
    assert not torch.equal(changed(transform, IMAGES, SEED + 1), found)
    same = IMAGES[:1].repeat(40, 1, 1, 1)
    assert len({row.numpy().tobytes() for row in changed(transform, same)}) > 1


def test_of_a_dict_only_what_a_transform_is_for() -> None:
    x = {"image": IMAGES, "ids": torch.arange(40), "table": torch.ones(40, 3)}
    found = changed(cf.transform.Crop(1), x)
    assert torch.equal(found["table"], x["table"]) and not torch.equal(found["image"], IMAGES)
    noisy = changed(cf.transform.Noise(1.0), tuple(x.values()))
    assert isinstance(noisy, tuple) and torch.equal(noisy[1], x["ids"]) and not torch.equal(noisy[2], x["table"])
    with pytest.raises(cf.ConfigError, match="crop is for images"):
        changed(cf.transform.Crop(1), {"table": x["table"]})
    with pytest.raises(cf.ConfigError, match="noise is for floating-point numbers"):
        changed(cf.transform.Noise(1.0), x["ids"])


@pytest.mark.parametrize(
    "bad",
    [
        lambda: cf.transform.Crop(0),
        lambda: cf.transform.Flip(1.5),
        lambda: cf.transform.Noise(0.0),
        lambda: cf.transform.Mask(-0.1),
        lambda: cf.transform.Cutout(0),
    ],
)
def test_bad_arguments(bad: Any) -> None:
    with pytest.raises(cf.ConfigError):
        bad()


# In a run.


def images(size: int, source: torch.Generator) -> Any:
    x = torch.randn(size, 1, 8, 8, generator=source)
    return x, (x.mean(dim=(1, 2, 3)) > 0).long()


def flat(size: int, source: torch.Generator) -> Any:
    x = torch.randn(size, 5, generator=source, dtype=F64)
    return x, (x[:, 0] > 0).long()


def dense() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2)).to(F64)


def conv() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 2))


def same(x: Any, generator: torch.Generator) -> Any:
    return x


KL = cf.ComFedL(outer=cf.KL(0.3), lr=0.1, batch_size=4, local_steps=3)
ALL = cf.FedAvg(lr=0.1, batch_size=None, local_steps=3)
MAML = cf.ComFedL(inner=cf.Adapt(0.05, hessian_batch="own"), outer=cf.KL(0.3), lr=0.1, batch_size=4, local_steps=2)


def assert_equal(one: cf.Result, other: cf.Result) -> None:
    assert all(torch.equal(part, other.params[name]) for name, part in one.params.items())
    assert one.rounds == other.rounds and one.clients == other.clients


@pytest.mark.parametrize("method", [KL, ALL, MAML], ids=["batches", "all data", "adapt"])
@pytest.mark.parametrize("path", ["auto", "serial", "vmap"])
def test_the_identity_changes_no_bit(method: Any, path: str) -> None:
    options: dict[str, Any] = {"rounds": 3, "engine_options": {"vectorize": path}}
    plain = cf.fit(dense(), federated(flat), method, **options)
    assert_equal(cf.fit(dense(), federated(flat), method, transform=same, **options), plain)


def test_the_identity_changes_no_bit_of_images_and_dicts() -> None:
    plain = cf.fit(conv(), federated(images), KL, rounds=2)
    assert_equal(cf.fit(conv(), federated(images), KL, rounds=2, transform=[same, same]), plain)
    assert_equal(CASES["transformer"].fit(KL, rounds=2, transform=same), CASES["transformer"].fit(KL, rounds=2))


@pytest.mark.parametrize("method", [KL, ALL, MAML], ids=["batches", "all data", "adapt"])
@pytest.mark.parametrize("path", ["serial", "vmap"])
def test_every_path_changes_batches_alike(method: Any, path: str) -> None:
    stacked, other = (
        cf.fit(
            dense(),
            federated(flat),
            method,
            rounds=3,
            transform=[cf.transform.Noise(0.3), cf.transform.Mask(0.2)],
            engine_options={"vectorize": each},
        )
        for each in ("auto", path)
    )
    for name, part in stacked.params.items():
        torch.testing.assert_close(part, other.params[name], rtol=0, atol=1e-12)
    plain = cf.fit(dense(), federated(flat), method, rounds=3)
    assert any(float((part - plain.params[name]).abs().max()) > 1e-3 for name, part in stacked.params.items())


class Watch:
    """The identity, which counts its calls by the number of samples."""

    def __init__(self) -> None:
        self.sizes: Counter[int] = Counter()
        self.lock = threading.Lock()

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        with self.lock:
            self.sizes[len(x)] += 1
        return x


@pytest.mark.parametrize("path", ["auto", "serial"])
@pytest.mark.parametrize(
    ("method", "calls"),
    [
        (KL, {4: 3}),  # its losses are those of the whole train data
        (cf.DRFA(0.05, lr=0.1, batch_size=4, local_steps=3), {4: 3}),
        (cf.Robust(0.3, on="outer", lr=0.1, batch_size=4, local_steps=3), {4: 3}),
        (MAML, {4: 2 * 3}),  # the inner, the outer and the Hessian's batches
        (cf.Ditto(lam=0.5, lr=0.1, batch_size=4, local_steps=3), {4: 2 * 3}),  # for both of its models
    ],
    ids=["kl", "drfa", "on outer", "adapt", "ditto"],
)
def test_only_training_batches_are_changed(method: Any, calls: dict[int, int], path: str) -> None:
    watch = Watch()
    cf.fit(
        dense(),
        federated(flat),
        method,
        rounds=2,
        eval_every=1,
        transform=watch,
        engine_options={"vectorize": path},
    )
    assert watch.sizes == {size: count * 2 * 3 for size, count in calls.items()}


def test_what_is_evaluated_stays_as_it_is() -> None:
    """With a model that does not move, the records are those of a run without a transform."""

    def erased(x: Tensor, generator: torch.Generator) -> Tensor:
        return x.zero_()  # in place, of a copy

    still = cf.ComFedL(outer=cf.KL(0.3), lr=1e-300, batch_size=None, local_steps=3)
    plain, found = (cf.fit(dense(), federated(flat), still, rounds=2, transform=f) for f in (None, erased))
    assert found.rounds == plain.rounds


def test_a_composition_has_both_batches_changed() -> None:
    seen: list[tuple[int, ...]] = []

    def recorded(x: Tensor, generator: torch.Generator) -> Tensor:
        seen.append(tuple(x.shape))
        return x

    problem = cf.Composition(lambda w, b: b[0].mean(0) * w["w"], lambda y, b: (y - b[0].mean(0)[:5]).square().sum())
    outer = {name: torch.ones(7, 6, dtype=F64) for name in "abc"}
    fed = cf.FederatedData(dict(federated(flat).train), outer=outer)
    method = cf.ComFedL(problem=problem, lr=0.01, batch_size=4, local_steps=2)
    cf.fit({"w": torch.ones(5, dtype=F64)}, fed, method, rounds=1, transform=recorded)
    assert Counter(seen) == {(4, 5): 6, (4, 6): 6}


def test_a_clients_noise_depends_on_nothing_but_its_key() -> None:
    """The same whoever takes part; another in another round, for another client, and another batch."""
    seen: dict[str, list[Tensor]] = {}

    def run(clients: str, **options: Any) -> list[Tensor]:
        drawn: list[Tensor] = []

        def noise(x: Tensor, generator: torch.Generator) -> Tensor:
            drawn.append(torch.rand(2, generator=generator))
            return x

        data = federated(flat).train
        fed = cf.FederatedData({name: data[name] for name in clients})
        serial = {"vectorize": "serial", "workers": 1}
        cf.fit(dense(), fed, ALL, rounds=2, transform=noise, engine_options=serial, **options)
        return drawn

    seen["abc"], seen["b"] = run("abc"), run("b")
    assert len(seen["abc"]) == 2 * 3 * 3 and len({tuple(each.tolist()) for each in seen["abc"]}) == 18
    of_b = [seen["abc"][k] for k in (3, 4, 5, 12, 13, 14)]
    assert all(torch.equal(one, other) for one, other in zip(of_b, seen["b"], strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(seen["b"], run("b", seed=1), strict=True))


def from_torch(x: Tensor, generator: torch.Generator) -> Tensor:
    """As torchvision does, from torch's own generator."""
    return x + 0.1 * torch.randn_like(x)


def test_noise_of_torchs_own_generator_is_repeatable_and_disturbs_no_dropout() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.Linear(6, 2)).to(F64)

    def silent(x: Tensor, generator: torch.Generator) -> Tensor:
        torch.rand(7)
        return x

    runs = []
    for path in ("auto", "auto", "serial"):
        torch.rand(3)  # whatever state the generator is in
        options: dict[str, Any] = {"rounds": 2, "engine_options": {"vectorize": path}}
        runs.append(cf.fit(model(), federated(flat), KL, transform=from_torch, **options))
    assert_equal(runs[0], runs[1])
    for name, part in runs[0].params.items():
        torch.testing.assert_close(part, runs[2].params[name], rtol=0, atol=1e-12)
    assert_equal(
        cf.fit(model(), federated(flat), KL, rounds=2, transform=silent), cf.fit(model(), federated(flat), KL, rounds=2)
    )


@pytest.mark.parametrize("name", ["dense", "images", *CASES])
def test_a_resumed_run_is_the_same_to_the_bit(name: str, tmp_path: Path) -> None:
    def run(out: Path, **more: Any) -> cf.Result:
        options: dict[str, Any] = {"rounds": 6, "checkpoint_every": 2, "clients_per_round": 2, "out": out, **more}
        if name in CASES:
            f = cf.transform.Noise(0.2) if name == "two outputs" else rolled
            return CASES[name].fit(cf.Robust(0.3, lr=0.1, batch_size=4), transform=f, **options)
        model, data = (dense(), flat) if name == "dense" else (conv(), images)
        f = cf.transform.Noise(0.2) if name == "dense" else [cf.transform.Crop(1), cf.transform.Flip()]
        return cf.fit(model, federated(data), cf.Robust(0.3, lr=0.1, batch_size=4), transform=f, **options)

    whole = run(tmp_path / "whole")
    with pytest.raises(RuntimeError, match="a bug"):
        run(tmp_path / "cut", callbacks=[StopAt(3, RuntimeError("a bug"))])
    assert_equal(run(tmp_path / "cut", resume=True), whole)
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


# What a run records.


def test_a_run_without_a_transform_records_none(tmp_path: Path) -> None:
    cf.fit(dense(), federated(flat), KL, rounds=1, out=tmp_path / "run", transform=[])
    assert "transform" not in (tmp_path / "run" / "config.toml").read_text()


@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (cf.transform.Noise(0.5), '[transform]\nname = "noise"\nstd = 0.5'),
        ([cf.transform.Mask(0.1), from_torch], '{ name = "mask", probability = 0.1, value = 0.0 }'),
        (from_torch, ':from_torch"'),
        (Watch(), ':Watch"'),
    ],
    ids=["ours", "list", "function", "object"],
)
def test_a_run_records_its_transform(transform: Any, words: str, tmp_path: Path) -> None:
    def run(f: Any, **options: Any) -> cf.Result:
        return cf.fit(dense(), federated(flat), KL, out=tmp_path / "run", transform=f, **options)

    run(transform, rounds=1)
    assert words in (tmp_path / "run" / "config.toml").read_text()
    run(transform, rounds=2, resume=True)
    with pytest.raises(cf.RunFolderError, match="another config"):
        run(cf.transform.Noise(0.25), rounds=3, resume=True)


class Shift:
    def __init__(self, by: float, names: tuple[str, ...] = ("x",)) -> None:
        self.by, self.names, self._calls, self.lock = by, names, 0, threading.Lock()

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        self._calls += 1
        return x + self.by


def shifted(by: float, x: Tensor, generator: torch.Generator, *, scale: float = 1.0) -> Tensor:
    return scale * x + by


@pytest.mark.parametrize(
    ("transform", "again", "others"),
    [
        (Shift(0.5), Shift(0.5), [Shift(0.25), Shift(0.5, ("y",))]),
        (partial(shifted, 0.5), partial(shifted, 0.5), [partial(shifted, 0.25), partial(shifted, 0.5, scale=2.0)]),
        ([partial(Shift(0.5))], [partial(Shift(0.5))], [[partial(Shift(0.25))]]),
    ],
    ids=["object", "partial", "partial of an object"],
)
def test_a_run_is_not_resumed_with_other_arguments(transform: Any, again: Any, others: Any, tmp_path: Path) -> None:
    def run(f: Any, **options: Any) -> cf.Result:
        return cf.fit(dense(), federated(flat), KL, out=tmp_path / "run", transform=f, **options)

    run(transform, rounds=1)
    for same in (transform, again):
        run(same, rounds=2, resume=True)
    for other in others:
        with pytest.raises(cf.RunFolderError, match="another config"):
            run(other, rounds=3, resume=True)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"name": "noise", "std": 0.5}, cf.transform.Noise(0.5)),
        ("flip", cf.transform.Flip()),
        (["helpers.inputs:rolled", {"name": "mask", "probability": 0.1}], [rolled, cf.transform.Mask(0.1)]),
    ],
    ids=["table", "name", "list"],
)
def test_the_same_transform_in_toml(given: Any, wanted: Any, tmp_path: Path) -> None:
    settings = {
        "rounds": 1,
        "data": {"name": "digits", "clients": 3, "partition": "iid"},
        "algorithm": {"name": "fedavg"},
        "transform": given,
    }
    config = parse_config(settings)
    made = config.make_transform()
    assert made == (wanted if isinstance(wanted, list) else [wanted])
    if given == "flip":
        found = run_config(config, out=tmp_path / "run")
        again = parse_config(config.resolved())
        assert again.make_transform() == made
        fed = config.make_data()
        assert_equal(cf.fit(config.make_model(fed), fed, config.make_algorithm(), rounds=1, transform=wanted), found)
        assert cf.load_run(tmp_path / "run").settings.make_transform() == made


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("crp", ["transform.name is 'crp'", "crop"]),
        ({"name": "crop"}, ["transform.padding is missing"]),
        ({"name": "crop", "paddng": 4}, ["transform.paddng is not a key", "padding"]),
        ({"name": "flip", "probability": 2.0}, ["transform", "probability"]),
        ("nowhere:f", ["transform is 'nowhere:f'", "cannot be imported"]),
        ("helpers.inputs:TIME", ["must be a function"]),
        (7, ["transform"]),
    ],
)
def test_bad_transforms_in_toml(given: Any, words: list[str]) -> None:
    with pytest.raises(cf.ConfigError) as error:
        parse_config({"data": {"name": "digits"}, "algorithm": {"name": "fedavg"}, "transform": given})
    assert [word for word in words if word not in str(error.value)] == [], str(error.value)
    assert set(TRANSFORMS) == {"crop", "flip", "cutout", "noise", "mask"}


# Bad transforms.


def raises(x: Any, generator: torch.Generator) -> Any:
    raise KeyError("nothing")


@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (lambda x, g: x[:2], "returned 2 for 4 samples"),
        (lambda x, g: x.float(), "returned torch.float32 for torch.float64"),
        (lambda x, g: (x,), "returned a tuple of 1 for one tensor"),
        (lambda x, g: x.numpy(), "returned a ndarray for one tensor"),
        (lambda x, g: None, "returned a NoneType"),
        (raises, "raised KeyError: 'nothing'"),
    ],
)
@pytest.mark.parametrize("path", ["auto", "serial"])
def test_transforms_that_do_not_return_such_an_x(transform: Any, words: str, path: str) -> None:
    with pytest.raises(cf.ConfigError) as error:
        cf.fit(dense(), federated(flat), KL, rounds=1, transform=transform, engine_options={"vectorize": path})
    assert words in str(error.value) and "round 1, client 'a'" in str(error.value)


@pytest.mark.parametrize("given", ["crop", cf.transform.Flip, 3, [cf.transform.Flip(), 3]])
def test_what_is_no_transform(given: Any) -> None:
    with pytest.raises(cf.ConfigError, match=r"transform is .*, but it must be a function"):
        cf.fit(dense(), federated(flat), KL, rounds=1, transform=given)
