"""Feature workers: what they answer is what a trainer would have computed, and nobody waits for the dead."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import train.pool as pool
from tests.train.conftest import Launch
from tests.train.world import conversations, log_of, tiny_target
from train.feature_worker import main, serve
from train.features import OnlineFeatures
from train.pool import WorkerFeatures
from train.spool import Spool
from train.storage import Storage
from train.team import Team, devices_for

TAPS = (1, 2, 4)
ABOUT: dict[str, Any] = {"taps": list(TAPS), "feature_dtype": "float32"}


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    made = Spool(tmp_path / "spool")
    made.create(ABOUT)
    yield made
    made.let_go()


def source(spool: Spool, name: str = "00000-0") -> WorkerFeatures:
    target = tiny_target(torch.float32)
    return WorkerFeatures(
        spool, name, target, conversations([9, 5, 17, 12]), Storage(3, target.hidden_size, torch.float32)
    )


def answered(spool: Spool, name: str = "worker", count: int = 1) -> None:
    """Answer some requests as a worker does."""
    target, storage = tiny_target(torch.float32), Storage(3, 32, torch.float32)
    from train.features import run_target

    for _ in range(count):
        with spool.claimed() as request:
            assert request is not None
            spool.reply(request[0], run_target(target, TAPS, request[1]["ids"], request[1]["loss_mask"], storage))


def test_answers_are_the_online_states_bit_for_bit(spool: Spool) -> None:
    asking = source(spool)
    online = OnlineFeatures(asking.target, asking.conversations, TAPS, torch.float32)
    batches = [[0, 1], [2], [3, 1], [2]]  # one of them twice
    asking.expect(batches)
    asking.expect(batches[1:])  # asked for already
    assert len(list(spool.requests.iterdir())) == 4
    answered(spool, count=4)
    assert list(spool.requests.iterdir()) == []
    for indices in batches:
        ours, theirs = asking.batch(indices), online.batch(indices)
        assert ours.documents is None and theirs.documents is None
        fields = {name: value for name, value in vars(ours).items() if value is not None}
        assert all(torch.equal(value, getattr(theirs, name)) for name, value in fields.items())
    assert list(spool.answers.iterdir()) == []  # what was read is gone


def test_a_request_is_one_workers_alone_and_free_again_when_it_dies(spool: Spool) -> None:
    asking = source(spool)
    asking.expect([[0], [1]])
    with spool.claimed() as first, spool.claimed() as second, spool.claimed() as none:
        assert first is not None and second is not None and none is None
        assert first[0] < second[0]  # the oldest first
    asking.expect([[0], [1], [2]])
    with pytest.raises(RuntimeError), spool.claimed() as one:
        assert one is not None
        raise RuntimeError("dies")
    with spool.claimed() as again:
        assert again is not None and one is not None and again[0] == one[0]


def test_what_a_worker_cannot_compute_is_said(spool: Spool) -> None:
    asking = source(spool)
    asking.expect([[0]])
    target = tiny_target(torch.float32)
    target.forward = lambda *_, **__: (_ for _ in ()).throw(RuntimeError("out of memory"))  # type: ignore[method-assign]
    running = threading.Thread(target=serve, args=(spool, spool.about(), target))
    running.start()
    with pytest.raises(ValueError, match="a feature worker failed: states of a batch of 1×9 tokens: out of memory"):
        asking.batch([0])
    spool.let_go()  # the run ends, and with it the worker
    running.join(timeout=20)
    assert not running.is_alive()


def test_without_workers_a_run_gives_up_and_says_how_to_start_one(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "PATIENCE", 0.0)
    monkeypatch.setattr(pool, "LOOK_SECONDS", 0.0)
    with pytest.raises(
        ValueError, match=r"no feature worker has been at work .* start some with `python .*feature_worker\.py"
    ):
        source(spool).batch([0])


def test_two_runs_do_not_share_a_spool(spool: Spool) -> None:
    with pytest.raises(OSError, match="in use by another run"):
        Spool(spool.folder).create(ABOUT)
    spool.let_go()
    (spool.requests / "left.safetensors").write_bytes(b"")  # of a run that was killed
    other = Spool(spool.folder)
    other.create(ABOUT)
    assert list(other.requests.iterdir()) == []
    other.let_go()


def test_removing_a_spool_spares_what_is_not_its_own(spool: Spool) -> None:
    (spool.folder / "notes.txt").write_text("mine")
    spool.let_go()
    spool.remove()
    assert [path.name for path in spool.folder.iterdir()] == ["notes.txt"]


def test_a_worker_that_comes_too_early_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("train.feature_worker.WAIT_SECONDS", 0.05)
    assert main([str(tmp_path / "nowhere"), "--device", "cpu"]) == 2
    assert "no run has begun" in capsys.readouterr().err


def test_where_workers_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices_for(2, torch.device("cpu"), 4) == ["cpu", "cpu"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert devices_for(2, torch.device("cuda"), 6) == ["cuda:6", "cuda:7"]
    with pytest.raises(ValueError, match=r"of this machine's 8 GPUs 7 train: launch with at most --num_processes 6"):
        devices_for(2, torch.device("cuda"), 7)


def test_two_workers_give_the_losses_of_online_and_one_may_die(
    world: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real processes. One is killed after the first step; the run ends as it would have, and leaves nothing behind."""
    spools: list[Path] = []
    teams: list[Team] = []
    made = Team.__init__

    def watched(self: Team, folder: Path, *rest: Any) -> None:
        made(self, folder, *rest)
        spools.append(folder)
        teams.append(self)

    original = WorkerFeatures.batch

    def killing(self: WorkerFeatures, indices: Any) -> Any:
        if self._serial > 3 and teams[0].processes[0].poll() is None:
            os.kill(teams[0].processes[0].pid, signal.SIGKILL)
        return original(self, indices)

    monkeypatch.setattr(Team, "__init__", watched)
    monkeypatch.setattr(WorkerFeatures, "batch", killing)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    quick = ("--eval.prompts", 0, "--train.micro_tokens", 80)
    launch(*quick, "--data.features", "online", "--output.folder", world / "online")
    began = time.monotonic()
    launch(*quick, "--data.features", "workers", "--output.folder", world / "workers")
    assert [process.returncode for process in teams[0].processes] == [-signal.SIGKILL, 0]
    assert "batches computed" in teams[0].logs[1].read_text()
    assert not spools[0].exists(), time.monotonic() - began
    free = {"train/tokens_per_second", "train/peak_memory_gib"}
    ours, theirs = log_of(world / "workers"), log_of(world / "online")
    assert [{k: v for k, v in line.items() if k not in free} for line in ours] == [
        {k: v for k, v in line.items() if k not in free} for line in theirs
    ]
