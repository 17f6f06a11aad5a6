"""Clients on several threads: bit-identical results, one learner per thread, and the faster way wins."""

from __future__ import annotations

import copy
import itertools
import logging
import random
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

import comfedl as cf
from comfedl.core.learner import Learner
from comfedl.engines import thread_pool as module
from comfedl.engines.embedded import Embedded
from comfedl.engines.thread_pool import TRIAL, ThreadPool


def test_every_chunk_once_and_in_order() -> None:
    pool = ThreadPool(3)
    for _ in range(2 * len(TRIAL)):
        assert pool.run("s", lambda worker, chunk: chunk * 10, list(range(20))) == [10 * k for k in range(20)]


def test_no_two_jobs_have_one_worker_at_a_time() -> None:
    busy: set[int] = set()
    lock = threading.Lock()

    def job(worker: int, chunk: int) -> int:
        with lock:
            assert worker not in busy
            busy.add(worker)
        time.sleep(0.001)
        with lock:
            busy.remove(worker)
        return worker

    pool = ThreadPool(4)
    seen = set()
    for _ in TRIAL:
        seen |= set(pool.run("s", job, range(30)))
    assert seen == {0, 1, 2, 3}


@pytest.mark.parametrize("threads_help", [True, False])
def test_the_faster_way_is_kept(
    threads_help: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # A clock on which a call takes 0.01 s, or 0.02 s the slower way; the first call of each kind is slow.
    spent = [0.08 if turn < 2 else 0.01 if threads == threads_help else 0.02 for turn, threads in enumerate(TRIAL)]
    moments = iter([moment for seconds in spent for moment in (0.0, seconds)] + [0.0] * 9)
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(moments))

    def job(worker: int, chunk: int) -> bool:
        return threading.current_thread() is not threading.main_thread()

    pool = ThreadPool(2)
    with caplog.at_level(logging.INFO, "comfedl"):
        for threads in TRIAL:
            assert set(pool.run("s", job, range(6))) == {threads}
    assert set(pool.run("s", job, range(6))) == {threads_help}
    assert ("2 threads" if threads_help else "one thread") in caplog.text


def test_long_chunks_need_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONG", 0.001)
    pool = ThreadPool(2)

    def job(worker: int, chunk: int) -> bool:
        time.sleep(0.002)
        return threading.current_thread() is not threading.main_thread()

    assert set(pool.run("s", job, range(2))) == {False}
    assert set(pool.run("s", job, range(2))) == {True}


def test_the_first_error_in_the_order_of_chunks_comes_out() -> None:
    def job(worker: int, chunk: int) -> int:
        if chunk in (2, 5):
            raise ValueError(f"chunk {chunk}")
        return chunk

    pool = ThreadPool(2)
    for _ in range(len(TRIAL) + 1):
        with pytest.raises(ValueError, match="chunk 2"):
            pool.run("s", job, range(8))
        pool.run("s", lambda worker, chunk: chunk, range(4))


def test_no_job_goes_on_when_one_has_failed() -> None:
    done: list[int] = []

    def job(worker: int, chunk: int) -> None:
        if chunk == 0:
            raise ValueError("chunk 0")
        time.sleep(0.05)
        done.append(chunk)

    pool = ThreadPool(2)
    pool._choice["s"] = True
    with pytest.raises(ValueError, match="chunk 0"):
        pool.run("s", job, range(6))
    before = list(done)
    time.sleep(0.2)
    assert done == before and len(done) < 5


def test_learners_are_copied_before_any_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside vmap the parameters of a module cannot be copied."""
    where: list[threading.Thread] = []
    copy = Learner.copy

    def watched(self: Learner) -> Learner:
        where.append(threading.current_thread())
        return copy(self)

    monkeypatch.setattr(Learner, "copy", watched)
    options = {"vectorize": "vmap", "workers": 3, "memory_mb": 0.1}
    cf.fit(images(), data(12), cf.FedAvg(batch_size=4), rounds=len(TRIAL), engine_options=options)
    assert len(where) >= 2 and set(where) == {threading.main_thread()}


def images() -> nn.Module:
    torch.manual_seed(0)
    return cf.models.cnn4((1, 8, 8), 3, filters=4, norm="running")


def dense() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 3))


def data(clients: int = 60) -> cf.FederatedData:
    made = torch.Generator().manual_seed(1)
    draw = lambda n: (torch.randn(n, 1, 8, 8, generator=made), torch.randint(0, 3, (n,), generator=made))  # noqa: E731
    return cf.FederatedData({f"{i:02d}": draw(10 + i % 3) for i in range(clients)})


METHODS = [
    cf.FedAvg(batch_size=4),
    cf.Ditto(batch_size=4),
    cf.ComFedL(inner=cf.Adapt(0.1), outer=cf.KL(0.5), batch_size=4, lr=0.01),
]


@pytest.mark.parametrize("model", [images, dense])
@pytest.mark.parametrize("algorithm", METHODS, ids=lambda method: type(method).__name__)
def test_threads_change_no_bit(model: Any, algorithm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TRIAL", (True,) * 6)
    used: set[str] = set()
    for name in ("_run_one", "_run_many"):
        real = getattr(Embedded, name)

        def spy(self: Any, *args: Any, real: Any = real) -> Any:
            used.add(threading.current_thread().name)
            return real(self, *args)

        monkeypatch.setattr(Embedded, name, spy)
    results = []
    for workers in (1, 3):
        used.clear()
        results.append(cf.fit(model(), data(), algorithm, rounds=3, engine_options={"workers": workers}))
        assert (used == {"MainThread"}) == (workers == 1)
    one, other = results
    assert one.rounds == other.rounds and one.clients == other.clients
    for part in ("params", "buffers"):
        for name, tensor in getattr(one, part).items():
            assert torch.equal(tensor, getattr(other, part)[name])
    for name in one.names:
        for key, tensor in one.personal(name).items():
            assert torch.equal(tensor, other.personal(name)[key])


def test_noise_stays_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(64, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(x.flatten(1) + 0.1 * torch.randn(64))
            return out

    monkeypatch.setattr(module, "TRIAL", (True,) * 6)
    model = Noisy()
    runs = [cf.fit(model, data(), cf.FedAvg(batch_size=4), 2, engine_options={"workers": w}) for w in (1, 3)]
    assert runs[0].clients == runs[1].clients


class Attends(nn.Module):
    """A model of a user's own with layers that the library does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.attention(x.view(-1, 8, 8)).flatten(1))
        return out


class Draws(Attends):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.factor())

    def factor(self) -> float:
        return 1 + 0.1 * torch.rand(()).item()


class DrawsInPython(Draws):
    def factor(self) -> float:
        return 1 + 0.1 * random.random()


class Remembers(Attends):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.latest = x.detach()
        return super().forward(x)


class Counts(Attends):
    """Keeps state in a tensor of its own, and in a list, both changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.per_batch = torch.zeros(()), [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count(x)
        return super().forward(x)

    def count(self, x: torch.Tensor) -> None:
        self.seen += len(x)


class CountsInAList(Counts):
    def count(self, x: torch.Tensor) -> None:
        self.per_batch[0] += len(x)


class Cache:
    """A plain object that is changed in place."""

    def __init__(self) -> None:
        self.latest: torch.Tensor | None = None


class Slots:
    __slots__ = ("latest",)

    def __init__(self) -> None:
        self.latest: torch.Tensor | None = None


class KeepsInAnObject(Counts):
    kind: Any = Cache

    def __init__(self) -> None:
        super().__init__()
        self.own = {"caches": [self.kind()]}

    def count(self, x: torch.Tensor) -> None:
        self.own["caches"][0].latest = x.detach()


class KeepsInSlots(KeepsInAnObject):
    kind = Slots


class KeepsInASet(Counts):
    """Of which the size stays."""

    def __init__(self) -> None:
        super().__init__()
        self.last = {0}

    def count(self, x: torch.Tensor) -> None:
        self.last.clear()
        self.last.add(int(x.detach().sum() * 1e4))


class KeepsInAHiddenLayer(Counts):
    """Of which named_modules knows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.BatchNorm1d(64)]

    def count(self, x: torch.Tensor) -> None:
        self.hidden[0](x.flatten(1))


class KeepsItsOwnGenerator(Counts):
    def __init__(self) -> None:
        super().__init__()
        self.dice = random.Random(1)

    def count(self, x: torch.Tensor) -> None:
        self.dice.random()


class KeepsAnIterator(Counts):
    """Which does not show where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count()

    def count(self, x: torch.Tensor) -> None:
        next(self.numbers)

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.copy(self)


class KnowsItself(Attends):
    """Objects that refer to each other, and change nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = Cache()
        self.cache.owner = self  # type: ignore[attr-defined]
        self.parts = [self.cache, {"again": self.head}, nn.Identity(), torch.float32, (1, "two", None)]
        self.cache.parts = self.parts  # type: ignore[attr-defined]


def runs_of(model: nn.Module, algorithm: Any, caplog: pytest.LogCaptureFixture) -> tuple[list[cf.Result], str]:
    """A run on one thread and one on three, and what the log says about threads."""
    with caplog.at_level(logging.INFO, "comfedl"):
        found = [cf.fit(model, data(), algorithm, rounds=3, engine_options={"workers": w}) for w in (1, 3)]
    return found, caplog.text


@pytest.mark.parametrize("model", [Attends, KnowsItself])
@pytest.mark.parametrize("algorithm", METHODS[:2], ids=lambda method: type(method).__name__)
def test_a_model_of_the_users_own_runs_on_threads(
    algorithm: Any, model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "TRIAL", (True,) * 6)
    names: set[str] = set()
    real = Embedded._run_one

    def spy(self: Any, *args: Any) -> Any:
        names.add(threading.current_thread().name)
        return real(self, *args)

    monkeypatch.setattr(Embedded, "_run_one", spy)
    (one, other), told = runs_of(model(), algorithm, caplog)
    assert len(names) > 1 and "Clients of the step 'train' run on threads." in told
    assert one.rounds == other.rounds and one.clients == other.clients
    assert all(torch.equal(part, other.params[name]) for name, part in one.params.items())


@pytest.mark.parametrize(
    ("model", "algorithm", "why"),
    [
        (Draws, METHODS[0], "it draws random numbers"),
        (DrawsInPython, METHODS[0], "it draws random numbers"),
        (Remembers, METHODS[0], "the model keeps state from one batch to the next"),
        (Counts, METHODS[0], "the model keeps state from one batch to the next"),
        (CountsInAList, METHODS[0], "the model keeps state from one batch to the next"),
        (KeepsInAnObject, METHODS[0], "the model keeps state from one batch to the next"),
        (KeepsInSlots, METHODS[0], "the model keeps state from one batch to the next"),
        (KeepsInASet, METHODS[0], "the model keeps state from one batch to the next"),
        (KeepsInAHiddenLayer, METHODS[0], "the model keeps state from one batch to the next"),
        (KeepsItsOwnGenerator, METHODS[0], "the model keeps state from one batch to the next"),
        (KeepsAnIterator, METHODS[0], "whether a count in the model keeps state cannot be seen"),
        (Attends, METHODS[2], "second derivatives of attention switch torch's kernels"),
    ],
)
def test_what_is_not_safe_stays_on_one_thread(
    model: Any, algorithm: Any, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module.ThreadPool, "run", lambda *_: pytest.fail("it ran on threads"))
    random.seed(0)
    before = random.getstate(), torch.random.get_rng_state()
    (one, other), told = runs_of(model(), algorithm, caplog)
    assert f"Clients of the step 'train' run on one thread: {why}" in told
    if model is not DrawsInPython:  # its numbers are not keyed, on any number of threads
        assert one.rounds == other.rounds and one.clients == other.clients
        assert random.getstate() == before[0]
    assert torch.get_rng_state().shape == before[1].shape


def test_numbers_drawn_only_later_are_an_error() -> None:
    class Later(Draws):
        def factor(self) -> float:
            return super().factor() if float(next(self.parameters()).detach().sum()) != start else 1.0

    model = Later()
    start = float(next(model.parameters()).detach().sum())
    with pytest.raises(cf.ConfigError, match=r"drew random numbers in round \d+, but not when it was tried out"):
        cf.fit(model, data(), cf.FedAvg(batch_size=4, local_steps=1), rounds=3, engine_options={"workers": 3})


@pytest.mark.parametrize(("clients", "large", "shared"), [(2, True, False), (3, True, True), (2, False, True)])
def test_threads_only_where_they_pay(clients: int, large: bool, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model of a user's own with fewer clients than workers keeps torch's own threads."""
    if large:
        monkeypatch.setattr("comfedl.engines.embedded.SMALL", 1)
    found: set[tuple[bool, int]] = set()
    real = Embedded._run_one

    def spy(self: Any, *args: Any) -> Any:
        found.add((threading.current_thread() is threading.main_thread(), torch.get_num_threads()))
        return real(self, *args)

    monkeypatch.setattr(Embedded, "_run_one", spy)
    monkeypatch.setattr(module, "TRIAL", (True,) * 6)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        cf.fit(Attends(), data(clients), METHODS[0], rounds=2, engine_options={"workers": 3})
    finally:
        torch.set_num_threads(before)
    assert found - {(True, 1)} == ({(False, 1)} if shared else {(True, 2)})


def test_torchs_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        cf.fit(images(), data(4), cf.FedAvg(batch_size=4), rounds=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("workers", [0, -1, 1.5, "some", True])
def test_a_number_of_workers_that_cannot_be(workers: Any) -> None:
    with pytest.raises(cf.ConfigError, match="workers"):
        cf.fit(dense(), data(4), cf.FedAvg(), 1, engine_options={"workers": workers})
