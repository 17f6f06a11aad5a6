"""A run that is stopped at any instant and resumed is the same run, bit for bit."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import comfedl as cf
from comfedl.core.reply_validation import ReplyValidator
from comfedl.engines.embedded import Embedded
from comfedl.training import checkpoint, run_folder
from comfedl.training.callbacks import Callback
from comfedl.utils import tree
from comfedl.utils.errors import QuorumError
from comfedl.utils.lock import is_locked
from helpers.stopped import StopAt, files


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Linear(5, 3)).double()


def run(fed: cf.FederatedData, out: Path, algorithm: cf.FedAvg | None = None, **options: Any) -> cf.Result:
    method = algorithm or cf.Ditto(lam=0.5, lr=0.05, batch_size=4)
    options = {"rounds": 12, "checkpoint_every": 2, "clients_per_round": 2, "seed": 3, **options}
    return cf.fit(net(), fed, method, out=out, **options)


METHODS = [
    cf.FedAvg(lr=0.05, batch_size=4),
    cf.Ditto(lam=0.5, lr=0.05, batch_size=4),
    cf.ComFedL(outer=cf.KL(0.3), lr=0.05, batch_size=4),
    cf.DRFA(0.05, lr=0.05, batch_size=4),
    cf.DeltaFL(0.4, lr=0.05, batch_size=4),
    cf.AFL(0.05, lr=0.05, batch_size=4),
    cf.TRMAML(0.05, 0.05, lr=0.05, batch_size=4),
    cf.Robust(lr=0.05, batch_size=4),
    cf.Scaffold(lr=0.05, batch_size=4, lr_schedule=cf.schedule.Cosine(20)),
    cf.FedAvg(lr=0.01, batch_size=4, client_optimizer=cf.optim.Adam(keep_state=True)),
    cf.Ditto(lr=0.01, batch_size=4, client_optimizer=cf.optim.SGD(momentum=0.9, keep_state=True)),
    cf.FedAvg(lr=0.05, batch_size=4, server_optimizer=cf.optim.Yogi(lr=0.05)),
    cf.FedAvg(lr=0.05, batch_size=4, server_optimizer=cf.optim.SGD(momentum=0.9)),
]


def name_of(method: cf.FedAvg) -> str:
    used = (method.client_optimizer, method.server_optimizer)
    return " ".join([method.name, *(optimizer.name for optimizer in used if optimizer is not None)])


@pytest.mark.parametrize("method", METHODS, ids=name_of)
def test_a_stopped_run_goes_on_to_the_bit(three_clients: cf.FederatedData, tmp_path: Path, method: Any) -> None:
    options = {"clients_per_round": None} if isinstance(method, cf.AFL) else {}
    whole = run(three_clients, tmp_path / "whole", method, **options)
    with pytest.raises(RuntimeError, match="a bug"):
        run(three_clients, tmp_path / "cut", method, callbacks=[StopAt(7, RuntimeError("a bug"))], **options)
    result = run(three_clients, tmp_path / "cut", method, resume=True, **options)
    assert files(tmp_path / "cut") == files(tmp_path / "whole")
    assert result.rounds == whole.rounds
    assert result.clients == whole.clients
    assert result.traffic == whole.traffic
    assert all(torch.equal(result.personal("b")[name], whole.personal("b")[name]) for name in whole.params)


def test_the_model_of_a_resumed_run_lies_in_memory_as_that_of_a_run(
    three_clients: cf.FederatedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor's alignment within torch's 64 bytes decides how its products are rounded."""
    seen: list[int] = []
    ask = Embedded.run
    with pytest.raises(RuntimeError, match="a bug"):
        run(three_clients, tmp_path, callbacks=[StopAt(7, RuntimeError("a bug"))])

    def watched(engine: Embedded, step: str, clients: Any, message: dict[str, Any], number: int) -> Any:
        seen.extend(leaf.data_ptr() % 64 for leaf in tree.leaves(message))
        return ask(engine, step, clients, message, number)

    monkeypatch.setattr(Embedded, "run", watched)
    run(three_clients, tmp_path, resume=True)
    assert seen and not any(seen)


def test_a_finished_run_resumed_stays_as_it_is(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    whole = run(three_clients, tmp_path / "run")
    before = files(tmp_path / "run")
    again = run(three_clients, tmp_path / "run", resume=True)
    assert files(tmp_path / "run") == before
    assert again.rounds == whole.rounds


def test_resume_without_a_run_starts_one(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    run(three_clients, tmp_path / "whole")
    run(three_clients, tmp_path / "new", resume=True)
    assert files(tmp_path / "new") == files(tmp_path / "whole")


def test_a_run_that_fails_between_two_checkpoints_writes_one(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        run(three_clients, tmp_path / "run", callbacks=[StopAt(1, RuntimeError("early"))])
    assert [path.name for path in (tmp_path / "run" / "checkpoint").iterdir()] == ["round-000000001"]


def test_only_the_last_two_checkpoints_are_kept(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    run(three_clients, tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoint").iterdir()) == [
        "round-000000010",
        "round-000000012",
    ]


def test_without_a_number_a_checkpoint_comes_by_the_clock(
    three_clients: cf.FederatedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one after the last round, so that the run can be made longer."""
    run(three_clients, tmp_path / "quick", checkpoint_every=None)
    assert [path.name for path in (tmp_path / "quick" / "checkpoint").iterdir()] == ["round-000000012"]
    monkeypatch.setattr(run_folder, "SECONDS", 0.0)
    run(three_clients, tmp_path / "slow", checkpoint_every=None)
    assert sorted(path.name for path in (tmp_path / "slow" / "checkpoint").iterdir()) == [
        "round-000000011",
        "round-000000012",
    ]


# Kills.


def child(fed: cf.FederatedData, out: Path, method: Any = None) -> int:
    """Run in a new process, and return its id."""
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException), open(os.devnull, "w") as quiet:
            os.dup2(quiet.fileno(), 2)
            run(fed, out, method, rounds=40, resume=True)
            code = 0
        os._exit(code)
    return pid


# By what is kept beside the model. COMFEDL_KILLS=200 kills each of them that often.
KEEPING = {
    "ditto": cf.Ditto(lam=0.5, lr=0.05, batch_size=4),
    "kept adam": cf.FedAvg(lr=0.01, batch_size=4, client_optimizer=cf.optim.Adam(keep_state=True)),
    "scaffold, cosine": cf.Scaffold(lr=0.05, batch_size=4, lr_schedule=cf.schedule.Cosine(50)),
    "yogi": cf.FedAvg(lr=0.05, batch_size=4, server_optimizer=cf.optim.Yogi(lr=0.05)),
    "robust": cf.Robust(lr=0.05, batch_size=4),
}


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("name", KEEPING)
def test_a_run_killed_at_many_instants(three_clients: cf.FederatedData, tmp_path: Path, name: str) -> None:
    """SIGKILL at random instants, in rounds, evaluations and writes alike; then it is let through."""
    method, wanted = KEEPING[name], int(os.environ.get("COMFEDL_KILLS", 20 if name == "ditto" else 5))
    started = time.monotonic()
    run(three_clients, tmp_path / "whole", method, rounds=40)
    length = time.monotonic() - started
    chance, kills, finished, out = random.Random(5), 0, 0, tmp_path / "cut"
    while kills < wanted or not finished:
        pid = child(three_clients, out, method)
        if kills < wanted:
            time.sleep(chance.uniform(0, length / 6))
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            kills += 1
            continue
        assert os.WEXITSTATUS(status) == 0
        assert files(out) == files(tmp_path / "whole")
        assert not [path.name for path in (out / "checkpoint").iterdir() if path.name.startswith(".")]
        finished += 1
        shutil.rmtree(out)  # it was quicker than the kills: once more from the start


@pytest.mark.parametrize("at", range(6))
def test_a_kill_in_the_middle_of_a_checkpoint(
    three_clients: cf.FederatedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Die at every system call of a checkpoint's write: the previous checkpoint is used."""
    run(three_clients, tmp_path / "whole")
    calls = 0

    class Killed(BaseException):
        pass

    def dying(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 20 + at:
                raise Killed
            return function(*arguments, **options)

        return call

    with monkeypatch.context() as patched:
        for name in ("fsync", "replace", "open"):
            patched.setattr(checkpoint.os, name, dying(getattr(os, name)))
        # Death leaves no time to clean up.
        patched.setattr(run_folder.RunFolder, "_clean_up", lambda self, error: None)
        patched.setattr(checkpoint.shutil, "rmtree", lambda *arguments, **options: None)
        with pytest.raises(Killed):
            run(three_clients, tmp_path / "cut")
    run(three_clients, tmp_path / "cut", resume=True)
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_kill_before_each_file_takes_its_name(
    three_clients: cf.FederatedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config's, the checkpoints', the model's, each personal model's: nothing half-written stays behind."""
    run(three_clients, tmp_path / "whole", rounds=40)
    replace, left, names = os.replace, 0, []

    def dying(source: Any, target: Any) -> None:
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(
            os, "replace", lambda source, target: (names.append(Path(target).name), replace(source, target))
        )
        run(three_clients, tmp_path / "counted", rounds=40)
    assert {"config.toml", "model.safetensors", "b.safetensors", "summary.json"} <= set(names)
    for spared in sorted({0, 1, 2, *range(len(names) - 6, len(names))}):
        left = spared
        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", dying)
            pid = child(three_clients, tmp_path / "cut")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        run(three_clients, tmp_path / "cut", rounds=40, resume=True)
        assert files(tmp_path / "cut") == files(tmp_path / "whole")
        shutil.rmtree(tmp_path / "cut")


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_round_and_keeps_it(
    three_clients: cf.FederatedData, tmp_path: Path, number: signal.Signals
) -> None:
    class Send(Callback):
        def evaluated(self, row: Any, clients: Any) -> None:
            if row["round"] == 5:
                os.kill(os.getpid(), number)

    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    with pytest.raises(KeyboardInterrupt, match="after round 5"):
        run(three_clients, tmp_path / "cut", checkpoint_every=1000, callbacks=[Send()])
    assert {each: signal.getsignal(each) for each in handlers} == handlers
    saved = [path.name for path in (tmp_path / "cut" / "checkpoint").iterdir()]
    assert saved == ["round-000000005"]
    run(three_clients, tmp_path / "cut", checkpoint_every=1000, resume=True)
    run(three_clients, tmp_path / "whole", checkpoint_every=1000)
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


# Damage.


def stopped(fed: cf.FederatedData, out: Path, after: int = 7) -> list[Path]:
    with pytest.raises(RuntimeError):
        run(fed, out, callbacks=[StopAt(after, RuntimeError("stop"))])
    return sorted((out / "checkpoint").iterdir())


@pytest.mark.parametrize("file", ["tensors.safetensors", "meta.json"])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "missing"])
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_serves(
    three_clients: cf.FederatedData, tmp_path: Path, file: str, damage: str
) -> None:
    run(three_clients, tmp_path / "whole")
    last = stopped(three_clients, tmp_path / "cut")[-1] / file
    content = bytearray(last.read_bytes())
    content[len(content) // 2] ^= 1
    states = {"truncated": content[: len(content) // 2], "flipped": content, "empty": b""}
    last.unlink() if damage == "missing" else last.write_bytes(states[damage])
    with pytest.warns(UserWarning, match="round-000000007 is damaged"):
        run(three_clients, tmp_path / "cut", resume=True)
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def test_when_no_checkpoint_is_whole_it_says_so(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    for saved in stopped(three_clients, tmp_path / "cut"):
        (saved / "meta.json").write_bytes(b"{}")
    with pytest.warns(UserWarning), pytest.raises(cf.RunFolderError, match=r"All checkpoints .* damaged; .* --force"):
        run(three_clients, tmp_path / "cut", resume=True)


def test_a_checkpoint_from_the_future(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    last = stopped(three_clients, tmp_path / "cut")[-1] / "meta.json"
    meta = json.loads(checkpoint._verified(last.read_bytes()))
    last.write_bytes(checkpoint._with_checksum(json.dumps(meta | {"version": 99}).encode()))
    with pytest.raises(cf.RunFolderError, match=r"another version .*format 99.*--force"):
        run(three_clients, tmp_path / "cut", resume=True)


def test_nothing_is_a_pickle(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    for saved in stopped(three_clients, tmp_path / "cut"):
        assert sorted(path.name for path in saved.iterdir()) == ["meta.json", "seconds.json", "tensors.safetensors"]
        assert load_file(saved / "tensors.safetensors")


def test_another_config_is_not_resumed(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    stopped(three_clients, tmp_path / "cut")
    with pytest.raises(cf.RunFolderError, match=r"another config .*quorum = 0.5 in the folder, quorum = 0.4 given"):
        run(three_clients, tmp_path / "cut", resume=True, quorum=0.4)
    with pytest.raises(cf.RunFolderError, match=r"another config \(quorum = 0.5 in the folder, quorum = 0.4 given\)"):
        run(three_clients, tmp_path / "cut", resume=True, quorum=0.4, rounds=100)  # more rounds are no other run


# Longer runs.


@pytest.mark.parametrize("method", METHODS, ids=name_of)
@pytest.mark.parametrize("every", [1, 3, 5])
def test_a_finished_run_made_longer_is_the_long_run(
    three_clients: cf.FederatedData, tmp_path: Path, method: Any, every: int
) -> None:
    """Also where the last round was evaluated only because it was the last."""
    options = {"eval_every": every, **({"clients_per_round": None} if isinstance(method, cf.AFL) else {})}
    long = run(three_clients, tmp_path / "long", method, rounds=17, **options)
    run(three_clients, tmp_path / "short", method, rounds=8, **options)
    result = run(three_clients, tmp_path / "short", method, rounds=17, resume=True, **options)
    assert files(tmp_path / "short") == files(tmp_path / "long")
    assert result.rounds == long.rounds and result.clients == long.clients and result.traffic == long.traffic


def test_a_finished_run_can_be_resumed_as_it_is(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    first = run(three_clients, tmp_path / "run", rounds=8, eval_every=3)
    before = files(tmp_path / "run")
    again = run(three_clients, tmp_path / "run", rounds=8, eval_every=3, resume=True)
    assert files(tmp_path / "run") == before and again.rounds == first.rounds


def test_a_run_is_not_made_shorter(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    run(three_clients, tmp_path / "run", rounds=8)
    before = files(tmp_path / "run")
    with pytest.raises(cf.RunFolderError, match=r"already has 8 rounds, but rounds is 5; give at least as many"):
        run(three_clients, tmp_path / "run", rounds=5, resume=True)
    assert files(tmp_path / "run") == before


def test_a_schedule_that_ends_at_0_does_not_get_longer(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    method = cf.FedAvg(lr=0.05, lr_schedule=cf.schedule.Cosine(8))
    run(three_clients, tmp_path / "run", method, rounds=8)
    before = files(tmp_path / "run")
    with pytest.raises(cf.ConfigError, match="lr_schedule is 0 at round 9"):
        run(three_clients, tmp_path / "run", method, rounds=20, resume=True)
    assert files(tmp_path / "run") == before


def test_other_data_are_not_resumed(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    stopped(three_clients, tmp_path / "cut")
    other = cf.FederatedData({name: three_clients.train[name] for name in ("a", "b")})
    with pytest.raises(cf.RunFolderError, match="other data"):
        run(other, tmp_path / "cut", resume=True)


def test_the_same_sizes_with_other_samples_are_other_data(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    stopped(three_clients, tmp_path / "cut")
    other = {name: (x.flip(0), y.flip(0)) for name, (x, y) in three_clients.train.items()}
    with pytest.raises(cf.RunFolderError, match="other data"):
        run(cf.FederatedData(other, dict(three_clients.validation or {})), tmp_path / "cut", resume=True)


def test_another_loss_is_another_run(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    stopped(three_clients, tmp_path / "cut")
    with pytest.raises(cf.RunFolderError, match="another config"):
        run(three_clients, tmp_path / "cut", resume=True, loss=nn.functional.multi_margin_loss)


def test_a_run_of_the_readers_own_code_has_the_same_config_in_every_process(
    three_clients: cf.FederatedData, tmp_path: Path
) -> None:
    problem = cf.Composition(lambda params, batch: params["w"], lambda y, batch: (y**2).sum())
    method = cf.ComFedL(problem=problem)
    cf.fit({"w": torch.ones(3)}, three_clients, method, rounds=1, out=tmp_path / "run")
    assert " at 0x" not in (tmp_path / "run" / "config.toml").read_text()


def test_a_finished_run_that_goes_on_anew_is_not_taken_for_finished(
    three_clients: cf.FederatedData, tmp_path: Path
) -> None:
    """Without a checkpoint it starts from the first round; until it has ended there is no summary."""
    run(three_clients, tmp_path / "run", checkpoint_every=None)
    before = files(tmp_path / "run")

    class Look(Callback):
        def evaluated(self, row: Any, clients: Any) -> None:
            assert not (tmp_path / "run" / "summary.json").exists()

    run(three_clients, tmp_path / "run", checkpoint_every=None, resume=True, callbacks=[Look()])
    assert files(tmp_path / "run") == before


def test_force_and_resume_do_not_go_together(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    with pytest.raises(cf.ConfigError, match="both"):
        run(three_clients, tmp_path / "run", resume=True, force=True)
    with pytest.raises(cf.ConfigError, match="without out"):
        cf.fit(net(), three_clients, cf.FedAvg(), resume=True)


# A full disk, a folder that cannot be written, and two runs at once.


@pytest.mark.skipif(sys.platform == "win32", reason="needs RLIMIT_FSIZE")
def test_a_full_disk_leaves_the_last_checkpoint(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    run(three_clients, tmp_path / "whole")

    class Fill(Callback):
        def settled(self, snapshot: checkpoint.Snapshot) -> None:
            if snapshot.round == 6:
                resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with pytest.raises(cf.RunFolderError, match=r"cannot be written .*make room"):
            run(three_clients, tmp_path / "cut", callbacks=[Fill()])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    run(three_clients, tmp_path / "cut", resume=True)
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def test_a_folder_is_locked_while_a_run_writes_it(three_clients: cf.FederatedData, tmp_path: Path) -> None:
    class Second(Callback):
        said = ""

        def evaluated(self, row: Any, clients: Any) -> None:
            for options in ({"force": True}, {"resume": True}):
                with pytest.raises(cf.RunFolderError, match="being written by another run"):
                    run(three_clients, tmp_path / "run", **options)

    run(three_clients, tmp_path / "run", rounds=2, callbacks=[Second()])
    assert not is_locked(tmp_path / "run")
    run(three_clients, tmp_path / "other", rounds=2)
    assert files(tmp_path / "run") == files(tmp_path / "other")


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and users")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("when", ["from the start", "after round 6"])
def test_a_folder_that_cannot_be_written(three_clients: cf.FederatedData, when: str) -> None:
    """One clear error, and the last checkpoint stays usable. Permissions do not hold root back: it becomes nobody."""

    class Lock(Callback):
        def settled(self, snapshot: checkpoint.Snapshot) -> None:
            if snapshot.round == 6:
                for path in (out / "checkpoint", out):
                    path.chmod(0o555)

    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        base.chmod(0o555 if when == "from the start" else 0o777)
        out = base / "run"
        pid = os.fork()
        if pid == 0:
            code = 3
            with contextlib.suppress(BaseException):
                if os.geteuid() == 0:
                    os.setuid(65534)
                try:
                    run(three_clients, out, callbacks=[Lock()])
                except cf.RunFolderError as error:
                    code = 0 if "cannot be written (Permission denied)" in str(error) else 1
            os._exit(code)
        _, status = os.waitpid(pid, 0)
        assert os.WEXITSTATUS(status) == 0
        if when == "from the start":
            assert not list(base.iterdir())
            return
        for path in (out, out / "checkpoint"):
            path.chmod(0o777)
        run(three_clients, out, resume=True)
        run(three_clients, base / "whole")
        assert files(out) == files(base / "whole")


# Many clients.


def many(clients: int = 30) -> cf.FederatedData:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4 * clients, 4, generator=generator, dtype=torch.float64)
    y = (x.sum(dim=1) > 0).long()
    return cf.FederatedData.from_flat((x, y, range(0, 4 * clients + 1, 4)))


@pytest.mark.parametrize("method", [*METHODS[1:4], METHODS[6]], ids=lambda method: method.name)
def test_a_stopped_run_of_many_clients_goes_on_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: Any
) -> None:
    """With what is for many clients alone: losses as changes, duals of the seen, personal models in one file."""
    monkeypatch.setattr("comfedl.core.client_vector.FEW", 8)
    monkeypatch.setattr("comfedl.core.dual_weights.FEW", 8)
    monkeypatch.setattr("comfedl.training.personal_models.MOST_FILES", 10)
    monkeypatch.setattr("comfedl.training.client_records.FEW", 3)
    options = {"clients_per_round": 5, "eval_clients": 7, "eval_every": 3}
    whole = run(many(), tmp_path / "whole", method, **options)
    with pytest.raises(RuntimeError, match="a bug"):
        run(many(), tmp_path / "cut", method, callbacks=[StopAt(7, RuntimeError("a bug"))], **options)
    result = run(many(), tmp_path / "cut", method, resume=True, **options)
    assert {path.name for path in (tmp_path / "cut" / "personal").iterdir()} == {"models.safetensors", "clients.json"}
    assert files(tmp_path / "cut") == files(tmp_path / "whole")
    assert result.rounds == whole.rounds and result.clients == whole.clients
    for name in ("03", "29"):
        assert all(torch.equal(part, whole.personal(name)[key]) for key, part in result.personal(name).items())


@pytest.mark.parametrize("method", METHODS[2:4], ids=lambda method: method.name)
def test_a_state_of_another_form_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: Any) -> None:
    """As written by another version; simulated by another limit for few clients."""
    for part in ("client_vector", "dual_weights"):
        monkeypatch.setattr(f"comfedl.core.{part}.FEW", 8)
    with pytest.raises(RuntimeError):
        run(many(), tmp_path / "run", method, callbacks=[StopAt(7, RuntimeError("a bug"))], clients_per_round=5)
    monkeypatch.undo()
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(cf.RunFolderError, match="another version of comfedl"):
        run(many(), tmp_path / "run", method, resume=True, clients_per_round=5)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_the_same_clients_are_evaluated_after_a_resume(tmp_path: Path) -> None:
    whole = run(many(), tmp_path / "whole", eval_clients=6)
    with pytest.raises(RuntimeError):
        run(many(), tmp_path / "cut", eval_clients=6, callbacks=[StopAt(5, RuntimeError("stop"))])
    result = run(many(), tmp_path / "cut", eval_clients=6, resume=True)
    assert result.clients == whole.clients and len({row["client"] for row in result.clients}) == 6
    with pytest.raises(cf.RunFolderError, match="another config"):
        run(many(), tmp_path / "cut", eval_clients=7, resume=True)


def test_states_are_those_before_a_round_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quorum is missed in round 5, after its clients have trained: the checkpoint is that of round 4."""
    whole = run(many(), tmp_path / "whole", clients_per_round=8)
    validate = ReplyValidator.validate

    def missed(self: ReplyValidator, round: int, asked: Any, replies: Any, sends: Any, others: int = 0) -> Any:
        if round == 5 and "model" in sends:
            raise QuorumError("too few")
        return validate(self, round, asked, replies, sends, others)

    with monkeypatch.context() as patched, pytest.raises(QuorumError):
        patched.setattr(ReplyValidator, "validate", missed)
        run(many(), tmp_path / "cut", clients_per_round=8, checkpoint_every=1000)
    assert [path.name for path in (tmp_path / "cut" / "checkpoint").iterdir()] == ["round-000000004"]
    config = tmp_path / "cut" / "config.toml"
    config.write_text(config.read_text().replace("checkpoint_every = 1000", "checkpoint_every = 2"))
    result = run(many(), tmp_path / "cut", clients_per_round=8, resume=True)
    assert files(tmp_path / "cut") == files(tmp_path / "whole")
    assert result.clients == whole.clients
