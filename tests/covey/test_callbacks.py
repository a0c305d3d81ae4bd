"""`covey.callbacks`: what trainers tell of their steps, and that they save when the job is asked to end."""

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from covey import callbacks
from covey.callbacks.for_logs import same_run
from covey.callbacks.told_steps import ToldSteps, finite
from covey.core.errors import EXIT_AGAIN


class JobOfRank:
    """The part of a JobClient that callbacks use; it is asked to end once it has told of `stops_at` steps."""

    def __init__(self, stops_at: int = 1 << 30) -> None:
        self.told: list[tuple[int, dict[str, Any]]] = []
        self.wrote: list[tuple[int, Path]] = []
        self.deferred, self._stops_at = False, stops_at

    def step(self, number: int, **metrics: Any) -> None:
        self.told.append((number, metrics))

    def saved(self, step: int, path: Path) -> None:
        self.wrote.append((step, path))

    def defer_stop(self) -> None:
        self.deferred = True

    @property
    def stopping(self) -> bool:
        return len(self.told) >= self._stops_at


def test_metrics_are_finite_numbers_by_names_that_a_step_does_not_use() -> None:
    class Tensor:
        def __init__(self, values: int) -> None:
            self.values = values

        def __float__(self) -> float:
            if self.values > 1:
                raise RuntimeError("a Tensor with several elements cannot be converted to Scalar")
            return 0.5

    logged = {"loss": Tensor(1), "all": Tensor(2), "worst": float("nan"), "name": "run 7", "step": 3, "step_s": 2}
    assert finite(logged) == {"loss": 0.5, "step_": 3.0, "step_s_": 2.0}


def test_outside_a_job_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COVEY_SOCKET", raising=False)
    told = ToldSteps()
    told.begins()
    told.step(0, {"loss": 1.0})
    told.wrote(1, "checkpoint")
    assert not told.stopping


def test_names_are_those_that_the_module_lists() -> None:
    assert sorted(callbacks._FROM) == sorted(callbacks.__all__)
    with pytest.raises(AttributeError, match=r"covey\.callbacks.*has no attribute 'ForEverything'"):
        _ = callbacks.ForEverything


def preempted(train: Callable[[JobOfRank], Any], *stops: int) -> tuple[Any, list[JobOfRank]]:
    """What a training returns that is asked to end after so many steps of each start but its last; and the starts."""
    starts = [JobOfRank(stop) for stop in stops]
    for job in starts:
        with pytest.raises(SystemExit) as ended:
            train(job)
        assert ended.value.code == EXIT_AGAIN
    return train(last := JobOfRank()), [*starts, last]


def losses(starts: list[JobOfRank]) -> list[tuple[int, float]]:
    return [(number, metrics["loss"]) for job in starts for number, metrics in job.told]


def test_all_starts_of_a_job_are_one_run_of_wandb() -> None:
    job = {"COVEY_JOB_ID": "j7", "COVEY_JOB_NAME": "bert", "COVEY_CHECKPOINT_DIR": "/home/ann/c/j7-20260131T143000"}
    assert same_run(job) == {"id": "j7-20260131T143000", "name": "bert", "resume": "allow"}
    assert same_run({"COVEY_CHECKPOINT_DIR": "/c"}) == {}


@pytest.mark.torch
@pytest.mark.slow
def test_huggingface_trainer_is_preempted_three_times_and_has_the_same_losses(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="make scripts installs it")
    import torch

    def trained(folder: str, job: JobOfRank) -> Any:
        torch.manual_seed(1)
        config = transformers.GPT2Config(vocab_size=16, n_positions=4, n_embd=8, n_layer=1, n_head=1)
        model = transformers.GPT2LMHeadModel(config)
        words = [{"input_ids": torch.arange(4) + n % 9, "labels": torch.arange(4) + n % 9} for n in range(40)]
        arguments = transformers.TrainingArguments(
            str(tmp_path / folder), max_steps=8, save_strategy="no", logging_steps=1, report_to=[], use_cpu=True
        )
        covey_callback: Any = callbacks.ForTrainer(job)  # type: ignore[arg-type]
        trainer = transformers.Trainer(model, arguments, train_dataset=words, callbacks=[covey_callback])
        trainer.train(resume_from_checkpoint=callbacks.last_of(arguments.output_dir))
        learnt = torch.cat([each.detach().flatten() for each in model.parameters()])
        return learnt, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    whole = JobOfRank()
    expected, its_losses = trained("whole", whole)
    assert [number for number, _ in whole.told] == list(range(8)) and "loss" in whole.told[-1][1]
    assert whole.deferred and whole.wrote == [] and len(its_losses) == 8
    (learnt, found), starts = preempted(lambda job: trained("stopped", job), 3, 1, 2)
    assert [job.wrote for job in starts] == [[(n, tmp_path / f"stopped/checkpoint-{n}")] for n in (3, 4, 6)] + [[]]
    assert torch.equal(learnt, expected) and found == its_losses
    assert [number for job in starts for number, _ in job.told] == list(range(8))


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Lightning's, of PyTorch's names
def test_lightning_is_preempted_three_times_within_epochs_and_has_the_same_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lightning = pytest.importorskip("lightning", reason="make scripts installs it")
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="make scripts installs it")
    import torch

    class Line(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.line = torch.nn.Linear(2, 1)
            self.dropout = torch.nn.Dropout(0.5)

        def training_step(self, batch: Any, _: int) -> Any:
            loss = self.line(self.dropout(batch)).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 0.1)

    def trained(job: JobOfRank) -> Any:
        torch.manual_seed(1)
        model, covey_callback = Line(), callbacks.ForLightning(job=job)  # type: ignore[arg-type]
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=2,
            callbacks=[covey_callback],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        loader = torchdata.StatefulDataLoader(torch.arange(16.0).reshape(8, 2), 2, shuffle=True)
        trainer.fit(model, loader, ckpt_path=covey_callback.saved)
        return SimpleNamespace(line=model.line.weight.detach().clone(), path=covey_callback.path)

    monkeypatch.setenv("COVEY_CHECKPOINT_DIR", str(tmp_path / "whole"))
    (tmp_path / "whole").mkdir()
    whole = JobOfRank()
    expected = trained(whole)
    assert [number for number, _ in whole.told] == list(range(8)) and whole.deferred and whole.wrote == []
    monkeypatch.setenv("COVEY_CHECKPOINT_DIR", str(tmp_path))
    found, starts = preempted(trained, 2, 1, 1)  # the last is asked to end where an epoch does, and does a step more
    assert [job.wrote for job in starts] == [[(n, tmp_path / "lightning.ckpt")] for n in (2, 3, 5)] + [[]]
    assert torch.equal(found.line, expected.line) and losses(starts) == losses([whole])


@pytest.mark.torch
@pytest.mark.slow
def test_a_loop_of_accelerate_is_preempted_three_times_and_has_the_same_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerate = pytest.importorskip("accelerate", reason="make scripts installs it")
    import torch

    def trained(folder: str, job: JobOfRank) -> Any:
        torch.manual_seed(1)
        seeded = accelerate.DataLoaderConfiguration(use_seedable_sampler=True)
        accelerator = accelerate.Accelerator(cpu=True, dataloader_config=seeded)
        model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        loader = torch.utils.data.DataLoader(torch.arange(16.0).reshape(8, 2), 2, shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        covey_callback = callbacks.ForAccelerator(accelerator, tmp_path / folder, job)  # type: ignore[arg-type]
        step = covey_callback.resume()
        while step < 8:
            for batch in covey_callback.batches(loader):
                loss = model(batch).square().mean()
                optimizer.zero_grad()
                accelerator.backward(loss)
                optimizer.step()
                step += 1
                covey_callback.step(loss=loss)
        return torch.cat([each.detach().flatten() for each in model.parameters()])

    whole = JobOfRank()
    expected = trained("whole", whole)
    assert len(whole.told) == 8 and whole.deferred and not (tmp_path / "whole").exists()
    found, starts = preempted(lambda job: trained("stopped", job), 3, 1, 2)
    assert [job.wrote for job in starts] == [[(n, tmp_path / f"stopped/step-{n}")] for n in (3, 4, 6)] + [[]]
    assert [path.name for path in (tmp_path / "stopped").iterdir()] == ["step-6"], "what is older is removed"
    assert torch.equal(found, expected) and losses(starts) == losses([whole])


def loop(log: Any, saved: Path, first: int) -> None:
    """A loop of one's own with a log, as the callbacks' page has it."""
    import torch

    state = torch.load(saved) if saved.exists() else torch.tensor(8.0)
    for step in range(first, 8):
        state = state * 0.7
        log.step(step, loss=state)
        if log.stops():
            torch.save(state, saved)
            log.saved(step + 1, saved)
            log.again()
    log.close()


@pytest.mark.torch
@pytest.mark.slow
def test_tensorboard_has_each_loss_once_over_three_preemptions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="make scripts does")
    monkeypatch.delenv("RANK", raising=False)
    attempts = iter(range(1, 9))

    def trained(folder: str, job: JobOfRank) -> None:
        first = max((step for start in known[folder] for step, _ in start.wrote), default=0)
        known[folder].append(job)
        monkeypatch.setenv("COVEY_ATTEMPT", str(next(attempts)))
        log = callbacks.ForTensorBoard(tmp_path / folder, first, job)  # type: ignore[arg-type]
        loop(log, tmp_path / f"{folder}.pt", first)

    known: dict[str, list[JobOfRank]] = {"whole": [], "stopped": []}
    trained("whole", JobOfRank())
    preempted(lambda job: trained("stopped", job), 3, 1, 2)

    def read(folder: str, name: str) -> list[tuple[int, float]]:
        found = reads.EventAccumulator(str(tmp_path / folder)).Reload()
        return [(each.step, each.value) for each in found.Scalars(name)]

    assert read("stopped", "loss") == read("whole", "loss") and len(read("whole", "loss")) == 8
    assert losses(known["stopped"]) == losses(known["whole"])
    assert [int(value) for _, value in read("stopped", "covey/attempt")] == [2, 2, 2, 3, 4, 4, 5, 5]
    assert read("stopped", "covey/saved") == [(2, 3.0), (3, 4.0), (5, 6.0)]


@pytest.mark.torch
@pytest.mark.slow
def test_wandb_has_each_loss_once_over_three_preemptions_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="make scripts installs it")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("COVEY_JOB_ID", "j7")
    monkeypatch.setenv("COVEY_CHECKPOINT_DIR", "/c/j7-20260131T143000")
    known: list[JobOfRank] = []

    def trained(job: JobOfRank) -> None:
        first = max((step for start in known for step, _ in start.wrote), default=0)
        known.append(job)
        (folder := tmp_path / str(len(known))).mkdir()  # starts within one second would share a file's name
        log = callbacks.ForWandb(job, project="line", dir=str(folder))  # type: ignore[arg-type]
        loop(log, tmp_path / "last.pt", first)

    preempted(trained, 3, 1, 2)
    written = history(sorted(tmp_path.glob("?/wandb/offline-run-*/*.wandb")))
    assert [step for step, _ in written] == list(range(8)), "each step once, over four files of one run"
    assert written == losses(known)
    assert {path.name for path in tmp_path.glob("?/wandb/offline-run-*/*.wandb")} == {"run-j7-20260131T143000.wandb"}


def history(files: list[Path]) -> list[tuple[int, float]]:
    """Steps and losses in files of offline runs, which `wandb sync` sends."""
    from wandb.proto import wandb_internal_pb2

    found = dict[int, float]()
    for path in files:
        for data in records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            items = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            if "loss" in items:
                assert record.history.step.num not in found
                found[record.history.step.num] = items["loss"]
    return sorted(found.items())


def records(data: bytes) -> Iterator[bytes]:
    """Records of a file in LevelDB's log format, behind 7 bytes of W&B: in blocks of 32 KiB, each record in parts."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        left = (1 << 15) - at % (1 << 15)
        if left < 7:
            at += left
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        whole = (whole if kind in (3, 4) else b"") + data[at + 7 : at + 7 + size]  # whole, first, middle, last part
        if kind in (1, 4):
            yield whole
        at += 7 + size
