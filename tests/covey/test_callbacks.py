"""`covey.callbacks`: what trainers tell of their steps, and that they save when the job is asked to end."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from covey import callbacks
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


@pytest.mark.torch
@pytest.mark.slow
def test_huggingface_trainer_tells_its_steps_saves_when_asked_and_continues(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="make scripts installs it")
    import torch

    def trained(job: JobOfRank, folder: str) -> Any:
        torch.manual_seed(1)
        config = transformers.GPT2Config(vocab_size=16, n_positions=4, n_embd=8, n_layer=1, n_head=1)
        model = transformers.GPT2LMHeadModel(config)
        words = [{"input_ids": torch.arange(4) + n % 9, "labels": torch.arange(4) + n % 9} for n in range(40)]
        arguments = transformers.TrainingArguments(
            str(tmp_path / folder), max_steps=8, save_strategy="no", logging_steps=2, report_to=[], use_cpu=True
        )
        covey_callback: Any = callbacks.ForTrainer(job)  # type: ignore[arg-type]
        trainer = transformers.Trainer(model, arguments, train_dataset=words, callbacks=[covey_callback])
        trainer.train(resume_from_checkpoint=callbacks.last_of(arguments.output_dir))
        return torch.cat([each.detach().flatten() for each in model.parameters()])

    whole, stopped, resumed = JobOfRank(), JobOfRank(3), JobOfRank()
    expected = trained(whole, "whole")
    assert [number for number, _ in whole.told] == list(range(8)) and "loss" in whole.told[-1][1]
    assert whole.deferred and whole.wrote == []
    with pytest.raises(SystemExit) as ended:
        trained(stopped, "stopped")
    assert ended.value.code == EXIT_AGAIN
    assert stopped.wrote == [(3, tmp_path / "stopped/checkpoint-3")]
    assert torch.equal(trained(resumed, "stopped"), expected)
    assert [number for number, _ in resumed.told] == list(range(3, 8))


@pytest.mark.torch
@pytest.mark.slow
def test_lightning_tells_its_steps_saves_when_asked_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lightning = pytest.importorskip("lightning", reason="make scripts installs it")
    import torch

    monkeypatch.setenv("COVEY_CHECKPOINT_DIR", str(tmp_path))

    class Line(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.line = torch.nn.Linear(2, 1)

        def training_step(self, batch: Any, _: int) -> Any:
            loss = self.line(batch).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 0.1)

    def trained(job: JobOfRank) -> Any:
        torch.manual_seed(1)
        model, covey_callback = Line(), callbacks.ForLightning(job=job)  # type: ignore[arg-type]
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=4,
            callbacks=[covey_callback],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        loader = torch.utils.data.DataLoader(torch.arange(16.0).reshape(8, 2), 4)
        trainer.fit(model, loader, ckpt_path=covey_callback.saved)
        return SimpleNamespace(line=model.line.weight.detach().clone(), path=covey_callback.path)

    whole, stopped, resumed = JobOfRank(), JobOfRank(4), JobOfRank()
    expected = trained(whole)
    assert [number for number, _ in whole.told] == list(range(8)) and "loss" in whole.told[-1][1]
    with pytest.raises(SystemExit) as ended:
        trained(stopped)
    assert ended.value.code == EXIT_AGAIN
    assert stopped.wrote == [(4, expected.path)] and expected.path.is_file()
    assert torch.equal(trained(resumed).line, expected.line)
    assert [number for number, _ in resumed.told] == list(range(4, 8))
