"""From a script's tensors to what the log knows of models of its name: whole simulated agents, every process real."""

from typing import Any

from chaos.rackworld import SimRack
from covey.core.ids import JobId
from plugins.aggregator.plugin import PLUGIN as AGGREGATOR
from plugins.scheduler.plugin import PLUGIN as SCHEDULER


def job(rack: SimRack, id: str) -> Any:
    """The record in some host's copy of the log; None while it is not there."""
    return rack.plugin(rack.alive()[0], "scheduler").queue.jobs.get(JobId(id))


def is_over(rack: SimRack, id: str) -> bool:
    return bool(job(rack, id) is not None and job(rack, id).state in ("done", "failed", "cancelled"))


def run_once(rack: SimRack, key: str) -> Any:
    """Run one script: two workers and one tensor of 4 KiB. Returns the record of the job, once it is over."""
    spec = {"argv": ["trainer", "40", "1024"], "name": "bert", "workers": 2, "cwd": "/"}
    id = rack.submit(spec, key)
    rack.until(lambda: is_over(rack, id), 180, f"{id} is over")
    return job(rack, id)


def test_tensors_that_were_summed_tell_every_host_how_skewed_models_of_that_name_are() -> None:
    """Nobody says that the model is skewed: the aggregator's process counts bytes, the coordinator of the job asks it,
    tells the scheduler of its host, and that one the log. Reference: Tiresias §3.2, §3.4."""
    with SimRack(61, hosts=3, plugins=(SCHEDULER, AGGREGATOR)) as rack:
        rack.start().settle()
        filler = rack.submit({"argv": ["sleeper", "900"], "workers": 1, "cwd": "/"}, "filler-0")
        rack.until(lambda: job(rack, filler) is not None and job(rack, filler).state == "running", 60, "a filler runs")
        first = run_once(rack, "bert-run-1")
        assert first.state == "done"
        assert first.measured.tensors in ((4096, 4096), (4096, 4100)), (
            "one tensor; at the end there is a word of four bytes too"
        )
        assert len(first.start.places) == 1, "nothing was known of it: it is packed"
        assert not rack.wrong
        rack.run(2.0)
        for name in rack.alive():
            queue = rack.plugin(name, "scheduler").queue
            assert queue.models.skew(first.spec) > 0.9, f"{name} does not know that it is skewed"
            assert queue.models.shown_skew(first.spec) is None, f"{name} would spread it, and nobody saw it spread"
