"""One host of a gang is cut off. The ranks on the others hear nothing from there and end with an error, as under NCCL:
that counts as a lost host and not as a failure of the job, which is started again without it."""

from chaos import faults
from chaos.rackworld import SimRack
from chaos.stories.classes import known
from chaos.stories.cut_off import ranks
from chaos.story import ended

CUT_S = 100.0


def play(rack: SimRack) -> None:
    rack.settle()
    spec = {"argv": ["ring", "40"], "tenant": "red", "workers": 3, "pack": "apart", "cwd": "/"}
    job = rack.submit(spec, f"ring-job-{rack.world.seed}")
    rack.until(lambda: len(ranks(rack, job)) == 3, 30.0, "all ranks run")
    rack.run(rack.rng.uniform(2.0, 15.0))
    cut = rack.rng.choice(ranks(rack, job))
    others = tuple(name for name in rack.hosts if name != cut)
    faults.strike(rack.world, faults.Partition((cut,), others, False, CUT_S))
    rack.run(CUT_S / 2)
    assert known(rack, job).state != "failed", f"{job} failed, since {cut} was cut off"
    ended(rack, {job: ("done",)})
