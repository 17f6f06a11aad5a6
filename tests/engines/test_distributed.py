"""The distributed engine: the results of the embedded engine on several ranks, and ranks that die.

Run as a script under torchrun, this file does the runs of ``CASES`` on every rank and stores what each has come to.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import comfedl as cf
from comfedl.config.schema import parse_config, read_config, run_config
from comfedl.core.learner import Learner
from comfedl.core.protocol import Batches, Outcome
from comfedl.engines.distributed import assign_ranks
from comfedl.engines.process_group import Group
from comfedl.training.callbacks import Callback
from comfedl.utils import torchrun as started
from comfedl.utils.errors import ConfigError, Diverged, QuorumError, RankError, RankLost
from comfedl.utils.tree import Tree
from helpers.ranks import assert_close, forked

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="needs fork and signals"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


def federated(dtype: torch.dtype = torch.float64) -> cf.FederatedData:
    """Five clients of unequal size, one of them without validation data; the first sample of "d" is far out."""
    generator = torch.Generator().manual_seed(7)

    def client(samples: int, shift: float) -> tuple[Tensor, Tensor]:
        x = torch.randn(samples, 4, generator=generator, dtype=torch.float64) + shift
        y = (x.sum(dim=1) > 4 * shift).long() + (x[:, 0] > shift).long()
        return x.to(dtype), y

    train = {name: client(8 + 7 * k, 0.3 * k) for k, name in enumerate("abcde")}
    train["d"][0][0] = 9.0
    return cf.FederatedData(train, {name: client(6, 0.3 * k) for k, name in enumerate("abcd")})


def net(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def with_buffers(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 3)).to(dtype)


@dataclass(frozen=True)
class Odd(cf.Ditto):
    """A user-defined method in which one client's reply is not a model."""

    def train(self, learner: Learner, message: dict[str, Tree], state: Tree, batches: Batches) -> Outcome:
        outcome = super().train(learner, message, state, batches)
        if len(batches["inner"][0][0]) == 29 and bool(batches["inner"][0][0].max() == 9):
            return outcome._replace(reply={"model": {"params": {}, "buffers": {}}})
        return outcome


COMMON: dict[str, Any] = {"lr": 0.05, "batch_size": 4}
TABLE = {
    "FedAvg": cf.FedAvg(**COMMON),
    "ComFedL-KL": cf.ComFedL(outer=cf.KL(0.3), **COMMON),
    "DRFA": cf.DRFA(0.05, **COMMON),
    "DAMAML": cf.DAMAML(0.05, 0.5, **COMMON),
    "Ditto": cf.Ditto(lam=0.5, **COMMON),
}
# The name of a run: its model, method, type and further options.
Case = tuple[Callable[[torch.dtype], nn.Module], cf.FedAvg | Any, torch.dtype, dict[str, Any]]
CASES: dict[str, Case] = {
    f"{name} {str(dtype)[6:]}": (net, method, dtype, {"clients_per_round": 3})
    for name, method in TABLE.items()
    for dtype in (torch.float32, torch.float64)
}
F64 = torch.float64
CASES |= {
    "everybody": (net, cf.FedAvg(**COMMON), F64, {}),
    "one client a round": (with_buffers, cf.Ditto(lam=0.5, **COMMON), F64, {"clients_per_round": 1}),
    "buffers": (with_buffers, cf.ComFedL(outer=cf.KL(0.3), **COMMON), F64, {"clients_per_round": 3}),
    "distances": (net, cf.QFedAvg(0.5, **COMMON), F64, {"clients_per_round": 4}),
    "trimmed": (net, cf.FedAvg(aggregate="trimmed-mean", trim=0.3, clip_update_norm=0.1, **COMMON), F64, {}),
    "median": (net, cf.DRFA(0.05, aggregate="geometric-median", **COMMON), F64, {"clients_per_round": 4}),
    "faults": (
        with_buffers,
        cf.Robust(0.3, defence="strong", **COMMON),
        F64,
        {
            "faults": [
                *(cf.faults.SignFlip(["a"], 5.0), cf.faults.LossLie(["a"]), cf.faults.Noise(["b"], 0.1)),
                *(cf.faults.LabelFlip(["d"]), cf.faults.Straggler(["e"], 0.5), cf.faults.Dropout(0.2)),
            ],
            "quorum": 0.1,
        },
    ),
    "a bad reply": (net, Odd(lr=0.05, batch_size=None), F64, {"rounds": 5}),
    "kept Adam": (
        net,
        cf.FedAvg(client_optimizer=cf.optim.Adam(keep_state=True), clip_grad_norm=0.5, **COMMON),
        F64,
        {"clients_per_round": 3},
    ),
    "momentum on both sides": (
        net,
        cf.ComFedL(
            outer=cf.KL(0.3),
            client_optimizer=cf.optim.SGD(momentum=0.9, weight_decay=0.01),
            server_optimizer=cf.optim.SGD(momentum=0.9),
            lr_schedule=cf.schedule.Cosine(6),
            **COMMON,
        ),
        F64,
        {"clients_per_round": 3},
    ),
    "client momentum, weight decay": (
        net,
        cf.FedAvg(client_optimizer=cf.optim.SGD(momentum=0.9, weight_decay=0.05), **COMMON),
        F64,
        {"clients_per_round": 3},
    ),
    "client Adam": (net, cf.FedAvg(client_optimizer=cf.optim.Adam(), **COMMON), F64, {"clients_per_round": 3}),
    "server momentum": (net, cf.FedAvg(server_optimizer=cf.optim.SGD(momentum=0.9), **COMMON), F64, {}),
    "FedProx": (net, cf.FedProx(mu=0.5, **COMMON), F64, {"clients_per_round": 3}),
    "server Adam": (net, cf.FedAvg(server_optimizer=cf.optim.Adam(lr=0.05), **COMMON), F64, {}),
    "both, buffers": (with_buffers, cf.FedProx(mu=0.5, server_optimizer=cf.optim.Adam(lr=0.05), **COMMON), F64, {}),
    "Robust": (net, cf.Robust(**COMMON), F64, {}),
    "Robust, some, buffers": (with_buffers, cf.Robust(**COMMON), F64, {"clients_per_round": 3}),
    "weights from data set aside": (net, cf.Robust(on="outer", **COMMON), F64, {"outer_share": 0.3}),
    "excess losses": (net, cf.Robust(offset=cf.offset.Excess(steps=3), **COMMON), F64, {}),
    "excess losses of some": (
        with_buffers,
        cf.ComFedL(outer=cf.KL(0.3, on="outer", offset=cf.offset.Excess(steps=3)), **COMMON),
        F64,
        {"clients_per_round": 3},
    ),
    "generalisation": (net, cf.Robust(offset=cf.offset.Generalisation(0.5), **COMMON), F64, {"clients_per_round": 3}),
    "safe step": (net, cf.ComFedL(outer=cf.KL(0.3), step="safe", **COMMON), F64, {}),
    "SCAFFOLD": (net, cf.Scaffold(**COMMON), F64, {"clients_per_round": 3}),
    "SCAFFOLD, buffers": (with_buffers, cf.Scaffold(**COMMON), F64, {"clients_per_round": 3}),
    "early stopping": (
        net,
        cf.Ditto(lam=0.5, lr=1.0, batch_size=4),
        F64,
        {"rounds": 40, "stop": cf.EarlyStopping("validation.loss.worst", 3)},
    ),
    "a sample of clients": (net, cf.FedAvg(**COMMON), F64, {"eval_clients": 3, "eval_every": 2}),
}


def done(name: str, **options: Any) -> dict[str, Any]:
    """The results of a case."""
    module, method, dtype, more = CASES[name]
    result = cf.fit(module(dtype), federated(dtype), method, **{"rounds": 4, "seed": 5, **more, **options})
    return {
        "params": result.params,
        "buffers": result.buffers,
        "personal": [result.personal(client) for client in result.names],
        "rounds": result.rounds,
        "clients": list(result.clients),
        "traffic": result.traffic,
        "stopped": (result.best_round, result.stopped),
    }


def job(out: Path) -> None:
    """A rank's job: run all cases, and return their results and the sizes of gathered objects."""
    warnings.simplefilter("ignore")
    sizes: list[int] = []
    gathered = Group.all_gather_objects
    found = {name: done(name, engine="distributed") for name in CASES}
    Group.all_gather_objects = lambda self, value: (sizes.append(len(pickle.dumps(value))), gathered(self, value))[1]  # type: ignore[method-assign]
    torch.manual_seed(0)
    cf.fit(nn.Linear(4, 3000).double(), federated(), TABLE["FedAvg"], 2, engine="distributed")
    (out / f"rank-{os.environ['RANK']}").write_bytes(pickle.dumps((found, max(sizes), os.getpid())))


# Starting ranks.


def distributed(method: Any, fed: cf.FederatedData | None = None, **options: Any) -> cf.Result:
    quick = {"engine_options": {"timeout_s": 60}, "rounds": 3, "engine": "distributed", **options}
    return cf.fit(net(), fed or federated(), method, **quick)


def torchrun(ranks: int, *command: str, options: tuple[str, ...] = ()) -> list[str]:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *options]
    return [*start, *command]


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(map(str, (Path(cf.__file__).parents[1], Path(__file__).parents[1])))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


# The same numbers.


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Any], int, int]]:
    """The results of all cases on two ranks under torchrun."""
    out = tmp_path_factory.mktemp("ranks")
    ended = subprocess.run(torchrun(2, __file__, str(out)), env=environment(), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return [pickle.loads((out / f"rank-{rank}").read_bytes()) for rank in range(2)]


@pytest.mark.filterwarnings("ignore::comfedl.utils.errors.BadReply")
def test_two_ranks_give_the_embedded_run(ranks: list[tuple[dict[str, Any], int, int]]) -> None:
    for name, (_, _, dtype, _) in CASES.items():
        assert_close(ranks[0][0][name], done(name), 1e-6 if dtype == torch.float32 else 1e-12)


def test_all_ranks_have_the_same_bits(ranks: list[tuple[dict[str, Any], int, int]]) -> None:
    for name in CASES:
        assert_close(ranks[1][0][name], ranks[0][0][name], 0.0)


def test_models_are_not_gathered_for_a_mean(ranks: list[tuple[dict[str, Any], int, int]]) -> None:
    assert all(0 < largest < 15_000 * 8 / 4 for _, largest, _ in ranks)


def test_no_process_is_left(ranks: list[tuple[dict[str, Any], int, int]]) -> None:
    assert all(gone(pid) for _, _, pid in ranks)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_clients_are_shared_out_by_their_samples() -> None:
    sizes = np.random.default_rng(0).integers(1, 500, 200)
    for count in (1, 2, 3, 7):
        owner = assign_ranks(sizes, count)
        loads = np.bincount(owner, weights=sizes, minlength=count)
        assert loads.min() > 0 and loads.max() - loads.min() <= sizes.max()
        assert (owner == assign_ranks(sizes, count)).all()
    assert sorted(assign_ranks(np.array([100, 1, 1]), 3).tolist()) == [0, 1, 2]
    assert assign_ranks(np.array([100] * 10 + [1000]), 2).tolist() == [1] * 10 + [0]


# Errors come to all ranks.


def test_a_run_that_diverges_does_so_on_all_ranks(tmp_path: Path) -> None:
    method = cf.FedAvg(lr=1e308, batch_size=4)
    with pytest.raises(Diverged) as embedded:
        cf.fit(net(), federated(), method, 3)
    errors = forked(2, lambda rank: distributed(method, out=tmp_path / "run"))
    assert [type(error) for error in errors] == [Diverged, Diverged]
    assert {str(error).replace(error.advice, "").strip() for error in errors} == {
        str(embedded.value).replace(embedded.value.advice, "").strip()
    }
    assert not list(tmp_path.iterdir())


@dataclass(frozen=True)
class Raising(cf.FedAvg):
    """A method whose step fails on the second rank."""

    def train(self, learner: Learner, message: dict[str, Tree], state: Tree, batches: Batches) -> Outcome:
        if os.environ["RANK"] == "1":
            raise ZeroDivisionError("in a client's step")
        return super().train(learner, message, state, batches)


def test_a_step_that_raises_on_one_rank_ends_the_others_at_once() -> None:
    first, second = forked(2, lambda rank: distributed(Raising()))
    assert isinstance(second, ZeroDivisionError)
    assert isinstance(first, RankError) and "rank 1 has failed (ZeroDivisionError: in a client's step)" in str(first)


class Breaking(Callback):
    """Fails between two rounds, in the process that has callbacks."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def settled(self, snapshot: Any) -> None:
        if snapshot.round == 2:
            raise self.error


def test_what_ends_the_first_rank_ends_the_others() -> None:
    for error, others in ((OSError("no room"), RankError), (KeyboardInterrupt("stopped"), KeyboardInterrupt)):
        callbacks = [Breaking(error)]
        first, *rest = forked(3, lambda rank, callbacks=callbacks: distributed(cf.FedAvg(), callbacks=callbacks))
        assert type(first) is type(error)
        assert [type(each) for each in rest] == [others, others]
        assert all(str(error) in str(each) for each in rest)


def test_too_few_replies_save_the_last_round(tmp_path: Path) -> None:
    options = {"rounds": 20, "quorum": 1.0, "checkpoint_every": 100, "clients_per_round": 2, "seed": 1}
    with warnings.catch_warnings(action="ignore"), pytest.raises(QuorumError) as embedded:
        cf.fit(net(), federated(), Odd(batch_size=None), out=tmp_path / "one", **options)
    errors = forked(2, lambda rank: distributed(Odd(batch_size=None), out=tmp_path / "two", **options))
    assert [str(error) for error in errors] == [str(embedded.value)] * 2
    (one,), (two,) = ([*(tmp_path / name / "checkpoint").glob("*/tensors.safetensors")] for name in ("one", "two"))
    assert one.parent.name == two.parent.name
    kept = load_file(one)
    assert any(name.startswith("clients 0, ") for name in kept)  # what both ranks' clients keep
    order = [load_file(path)["clients 0"].argsort() for path in (one, two)]
    for name, part in load_file(two).items():
        same = kept[name]
        if name.startswith("clients"):
            same, part = same[order[0]], part[order[1]]
        torch.testing.assert_close(part, same, rtol=1e-12, atol=1e-12)


def test_ranks_with_other_data_are_refused() -> None:
    def other(rank: int) -> cf.Result:
        return distributed(cf.FedAvg(), federated(torch.float64) if rank else cf.FederatedData(OTHER))

    assert [type(error) for error in forked(2, other)] == [RankError, RankError]


def test_ranks_with_another_model_are_refused() -> None:
    def other(rank: int) -> cf.Result:
        module = net()
        with torch.no_grad():
            next(module.parameters())[0, 0] += 1e-6 * rank
        return cf.fit(module, federated(), cf.FedAvg(), 2, engine="distributed")

    errors = forked(2, other)
    assert all(type(error) is RankError and "different models" in str(error) for error in errors)


OTHER = {name: (torch.zeros(4, 4, dtype=F64), torch.zeros(4, dtype=torch.int64)) for name in "abcde"}


def test_more_ranks_than_clients() -> None:
    errors = forked(6, lambda rank: distributed(cf.FedAvg()))
    assert {str(error) for error in errors} == {
        "There are 6 ranks for 5 clients; start at most as many ranks as there are clients."
    }


def test_without_torchrun_the_command_is_told() -> None:
    with pytest.raises(ConfigError, match="torchrun --standalone --nproc-per-node 2 -m comfedl run"):
        distributed(cf.FedAvg())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"backend": "mpi"}, "backend is 'mpi'.* gloo"),
        ({"backend": "nccl"}, "not on a GPU"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"timeout": 3}, "did you mean 'timeout_s'"),
    ],
)
def test_options_that_cannot_be_used(options: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match=told):
        distributed(cf.FedAvg(), engine_options=options)


def test_the_table_of_a_config() -> None:
    settings = {"data": {"name": "digits"}, "algorithm": {"name": "fedavg"}, "engine": "distributed"}
    assert parse_config(settings).engine_options is None
    config = parse_config(settings, ["distributed.timeout_s=20", "distributed.workers=1"])
    assert config.engine_options is not None and config.engine_options["timeout_s"] == 20
    assert config.resolved()["distributed"] == config.engine_options
    for change, told in (
        ("distributed.backend=mpi", "distributed.backend is 'mpi'"),
        ("distributed.timeout_s=-1", "distributed.timeout_s is -1"),
        ("distributed.timout_s=3", "did you mean 'timeout_s'"),
        ("engine=embedded", "There is a table"),
    ):
        with pytest.raises(ConfigError, match=told):
            parse_config(settings, ["distributed.workers=1", change])


# Death and resume, from the command line. ``mortal`` kills a rank in its n-th client step.

MORTAL = """
import os, signal, time
from dataclasses import dataclass
from pathlib import Path
import comfedl as cf

Path(f"pid-{os.getpid()}").touch()
steps = 0

@dataclass(frozen=True)
class Mortal(cf.Ditto):
    def train(self, *arguments):
        global steps
        steps += 1
        time.sleep(float(os.environ.get("SLOWLY", 0)))
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if first and os.environ["RANK"] == os.environ.get("DIES") and steps == int(os.environ.get("DIES_AT", 0)):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train(*arguments)
"""
CONFIG = """
rounds = 12
checkpoint_every = 2
clients_per_round = 4
eval_every = 3
[data]
name = "digits"
partition = "dirichlet"
clients = 5
alpha = 0.5
[algorithm]
name = "mortal:Mortal"
lam = 0.5
local_steps = 2
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the config and the method, and the embedded run of it in ``embedded``."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mortal.py").write_text(MORTAL)
    (tmp_path / "c.toml").write_text(CONFIG)
    embedded(tmp_path / "embedded")
    return tmp_path


def embedded(out: Path, **options: Any) -> None:
    sys.modules.pop("mortal", None)
    run_config(read_config(Path("c.toml")), out=out, **options)


def command(out: str, *more: str) -> list[str]:
    return ["-m", "comfedl", "run", "c.toml", "--set", "engine=distributed", "--out", out, *more]


def assert_same_run(one: Path, other: Path, bound: float) -> None:
    for path in sorted(other.rglob("*.safetensors")):
        if path.parent.name in (other.name, "personal"):
            assert_close(load_file(one / path.relative_to(other)), load_file(path), bound)
    records = [(path / name).read_text() for path in (one, other) for name in ("rounds.jsonl", "clients.jsonl")]
    if bound == 0:
        assert records[:2] == records[2:]
    assert [text.count("\n") for text in records[:2]] == [text.count("\n") for text in records[2:]]


def test_a_rank_is_killed_and_the_run_goes_on(here: Path) -> None:
    ended = subprocess.run(
        torchrun(2, *command("killed")),
        env=environment(DIES="1", DIES_AT="13"),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ended.returncode != 0
    told = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(told) == 1 and "Another process of the run has ended" in told[0] and "--resume" in told[0]
    assert "third_party" not in told[0] and "stopping after this round" not in ended.stderr.partition("error: ")[2]
    assert "Traceback" not in ended.stderr.partition("error: ")[0]
    assert not (here / "killed" / "model.safetensors").exists()
    assert sorted((here / "killed" / "checkpoint").iterdir())
    for ranks in (1, 2, 3):
        shutil.copytree("killed", f"by-{ranks}")
        again = subprocess.run(torchrun(ranks, *command(f"by-{ranks}", "--resume")), env=environment(), timeout=500)
        assert again.returncode == 0
        assert_same_run(here / f"by-{ranks}", here / "embedded", 1e-6)
    # Restarts by torchrun give the same bits as a manual resume, even if the first rank died.
    dying = environment(DIES="0", DIES_AT="13")
    restarted = subprocess.run(
        torchrun(2, *command("restarted"), options=("--max-restarts=1",)), env=dying, timeout=500
    )
    assert restarted.returncode == 0
    assert_same_run(here / "restarted", here / "by-2", 0.0)
    # Another engine may resume the run, too.
    embedded(here / "killed", resume=True)
    assert_same_run(here / "killed", here / "embedded", 1e-6)
    assert 'engine = "embedded"' in (here / "killed" / "config.toml").read_text()
    pids = [int(path.name[4:]) for path in here.glob("pid-*")]
    assert len(pids) >= 10 and all(gone(pid) for pid in pids if pid != os.getpid())


def test_which_call_of_torchrun_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def goes_on(name: str, starts: str, parent: int) -> bool:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", starts)
        monkeypatch.setattr(os, "getppid", lambda: parent)
        return started.is_restart(tmp_path)

    assert not goes_on("one", "1", 1)  # nothing has begun here
    monkeypatch.setattr(os, "getppid", lambda: 1)
    started.record_launch(tmp_path)
    assert goes_on("one", "1", 1)
    assert goes_on("one", "1", os.getpid())  # on another host, which has counted
    assert goes_on("one", "0", 1)  # a rank has died on another host: torchrun has not counted it here
    assert not goes_on("one", "0", os.getpid())  # another call that was given the same name
    assert not goes_on("two", "1", 1)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert not started.is_restart(tmp_path)


def test_a_signal_to_torchrun_ends_the_round_and_keeps_it(here: Path) -> None:
    slow = environment(SLOWLY="0.1")
    with subprocess.Popen(torchrun(2, *command("stopped")), env=slow, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 300
        while not (here / "stopped" / "checkpoint").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=120)[1]
    assert process.returncode != 0
    assert "stopping after this round" in said and "Another process" not in said
    assert not (here / "stopped" / "model.safetensors").exists()
    assert all(gone(int(path.name[4:])) for path in here.glob("pid-*") if path.name != f"pid-{os.getpid()}")
    embedded(here / "stopped", resume=True)
    assert_same_run(here / "stopped", here / "embedded", 1e-6)


def test_misuse_from_the_command_line(here: Path) -> None:
    alone = subprocess.run(
        [sys.executable, *command("alone")], env=environment(), capture_output=True, text=True, timeout=300
    )
    assert alone.returncode == 2 and alone.stderr.startswith("error: ") and alone.stderr.count("\n") == 1
    assert "torchrun --standalone --nproc-per-node 2" in alone.stderr
    told = environment(RANK="0", WORLD_SIZE="2")
    for arguments, sentence in (
        (["run", "c.toml"], "engine=distributed, or start only one."),
        (["demo"], "only `comfedl run` can use them."),
    ):
        ended = subprocess.run(
            [sys.executable, "-m", "comfedl", *arguments], env=told, capture_output=True, text=True, timeout=300
        )
        assert ended.returncode == 2 and ended.stderr.strip().endswith(sentence)
    assert not (here / "alone").exists() and not (here / "runs").exists()


def test_a_lost_rank_is_told(tmp_path: Path) -> None:
    first, second = forked(2, lambda rank: distributed(Leaving(), out=tmp_path / "run", checkpoint_every=1))
    assert second is None  # it died without a result
    assert isinstance(first, RankLost) and "checkpoint" in str(first)
    assert not (tmp_path / "run").exists()  # it had no checkpoint


@dataclass(frozen=True)
class Leaving(cf.FedAvg):
    """A method that ends the second rank."""

    def train(self, learner: Learner, message: dict[str, Tree], state: Tree, batches: Batches) -> Outcome:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train(learner, message, state, batches)


if __name__ == "__main__":
    job(Path(sys.argv[1]))
