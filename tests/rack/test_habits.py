"""What people of other schedulers type, on real agents: scripts with #SBATCH lines, arrays, dependencies, holds."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.main import SLURM
from covey.hooks import SITE
from tests.rack.living_rack import EXAMPLES, LivingRack, living_rack, wait

pytestmark = [pytest.mark.rack, pytest.mark.xdist_group("rack")]
SCRIPT = """#!/bin/sh
#SBATCH -J BERT_large --gres=gpu:1 -n 2 -N 1
#SBATCH --gres=gpu:2 -t 10 --array=1-5%2
#SBATCH -o out/%x-%A-%a.txt
echo "$SLURM_ARRAY_JOB_ID $COVEY_TASK $SLURM_PROCID of $SLURM_NTASKS"
srun -n 1 sh -c 'echo once; test "$SLURM_ARRAY_TASK_ID" != 4'
"""


@pytest.fixture(scope="module")
def rack() -> Iterator[LivingRack]:
    with living_rack(2, 2) as found:
        yield found


def typed(rack: LivingRack, *words: str, code: int = 0) -> str:
    found, said = rack.agentctl(*words)
    assert found == code, said
    return said


def state(rack: LivingRack, job: str, *states: str, within_s: float = 60.0) -> None:
    wait(f"{job} is {' or '.join(states)}", lambda: rack.job(job)["state"] in states, within_s)


def submitted(said: str) -> str:
    return next(line.split()[0] for line in said.splitlines() if line.startswith("j"))


def test_an_array_runs_and_who_waits_for_it_is_held_when_a_task_failed(rack: LivingRack, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(SCRIPT)
    typed(rack, "submit", "--cwd", str(tmp_path), "--array", "10000000", str(tmp_path / "none.sh"), code=2)
    said = typed(rack, "submit", "--cwd", str(tmp_path), "--array", "0-9999999", str(tmp_path / "job.sh"), code=2)
    assert "10,000,000 tasks" in said and "at most 100,000 tasks" in said
    told = tmp_path / "told"
    said = typed(
        rack, "submit", "--cwd", str(tmp_path), "--notify", f'echo "$COVEY_AFTER" > {told}', str(tmp_path / "job.sh")
    )
    array = submitted(said)
    after = submitted(typed(rack, "submit", "--gpus", "0", "--after", f"ok:{array}", "--", "true"))
    state(rack, array, "failed")
    assert rack.job(array)["reason"] == "1 of 5 tasks failed: 4"
    number = array[1:]
    for task in range(1, 6):
        lines = (tmp_path / f"out/BERT_large-{number}-{task}.txt").read_text().splitlines()
        assert sorted(lines) == [f"{number} {task} {rank} of 2" for rank in (0, 1)] + ["once"]
    wait("the end is told", lambda: told.exists() and told.read_text() == f"{array}:failed:1\n", 30.0)
    assert "done first, failed (exit 1)" in rack.job(after)["reason"], rack.job(after)["reason"]
    assert "held" in typed(rack, "why", after) and rack.job(after)["held"]
    assert after in typed(rack, "jobs", "--state", "held", "-o", "name").split()
    typed(rack, "release", after)
    state(rack, after, "done")
    assert rack.job(f"{array}[4]")["exit_code"] == 1
    assert "there is no" in typed(rack, "job", f"{array}[9]", code=3)
    assert f"task 4 of {array}" in typed(rack, "why", f"{array}[4]")
    assert "once" in typed(rack, "logs", f"{array}[2]")
    assert f"agentctl logs {array}[1]" in typed(rack, "logs", array, code=3)


def test_jobs_are_held_requeued_moved_and_cancelled_by_what_they_have_in_common(rack: LivingRack) -> None:
    long = submitted(typed(rack, "submit", "--name", "long", "--gpus", "2", "--workers", "2", "--", "sleep", "100"))
    state(rack, long, "running")
    waits = [submitted(typed(rack, "submit", "--name", f"w{n}", "--gpus", "2", "--", "sleep", "100")) for n in range(3)]
    typed(rack, "priority", waits[2], "--up")
    listed = typed(rack, "jobs", "--sort", "queue", "--name", "w*", "-o", "csv", "--columns", "name,state")
    assert listed.split() == ["name,state", "w2,queued", "w0,queued", "w1,queued"]
    typed(rack, "hold", waits[2])
    typed(rack, "update", long, "--time", "1h")
    assert rack.job(long)["time_limit_s"] == 3600.0
    typed(rack, "requeue", long, "--hold")
    state(rack, waits[0], "running")
    state(rack, waits[1], "running")
    assert rack.job(long)["state"] == "queued" and "held: by" in rack.job(long)["reason"]
    later = submitted(typed(rack, "submit", "--gpus", "0", "--begin", "5s", "--", "true"))
    assert "waits for its time" in rack.job(later)["reason"]
    said = typed(rack, "cancel", "--name", "w?,long")
    assert said.count("agentctl wait") == 4
    for job in (long, *waits):
        state(rack, job, "cancelled")
    state(rack, later, "done")
    sweep = submitted(typed(rack, "submit", "--hold", "--gpus", "0", "--array", "0-9", "--", "true"))
    typed(rack, "cancel", f"{sweep}[3-9]")
    typed(rack, "release", sweep)
    state(rack, sweep, "done")
    assert "3 are done, 7 were cancelled" in rack.job(sweep)["reason"]
    assert typed(rack, "jobs", "--limit", "0", code=2) and "did you mean held?" in typed(
        rack, "jobs", "--state", "hold", code=2
    )


SAVES = """
import time
import numpy as np, covey
with covey.join() as job:
    began = job.tensors.save()
    w = job.tensors.model("w", np.zeros(1000, np.float32), update=covey.Adam())
    for step in range(began, 5000):
        time.sleep(0.02)
        w = job.tensors.push_pull("w", np.full(1000, job.rank + 1, np.float32))
        job.step(step)
"""


def test_a_job_saves_when_it_is_asked_and_its_stop_is_tried(rack: LivingRack, tmp_path: Path) -> None:
    """On two hosts, whose ranks each write what they keep."""
    (tmp_path / "saves.py").write_text(SAVES)
    options = ("--workers", "4", "--cwd", str(tmp_path), "--", sys.executable, "saves.py")
    job = submitted(typed(rack, "submit", "--gpus", "1", *options))
    plain = submitted(typed(rack, "submit", "--gpus", "0", "--", "sleep", "100"))
    state(rack, job, "running")
    wait("it makes steps", lambda: (rack.job(job)["step"] or 0) > 1, 30.0)
    assert "saved step" in typed(rack, "checkpoint", job)
    assert "has not called covey.join()" in typed(rack, "checkpoint", plain, code=4)
    said = typed(rack, "preempt", "--test", job)
    assert "by themselves" in said and "went on from it" in said, said
    view = rack.job(job)
    assert view["tally"]["attempt"] == 2 and view["tally"]["preemptions"] == 0
    assert "its stop is tried by" in typed(rack, "why", job)
    assert "needs --test" in typed(rack, "preempt", job, code=2)
    typed(rack, "cancel", job, plain)
    held = submitted(typed(rack, "submit", "--hold", "--gpus", "0", "--", "true"))
    assert "only a job that runs can be tried" in typed(rack, "preempt", "--test", held, code=4)
    typed(rack, "cancel", held)


def test_a_job_waits_for_its_time_and_no_longer(rack: LivingRack) -> None:
    began_s = time.time()
    job = submitted(typed(rack, "submit", "--gpus", "0", "--begin", "now+3seconds", "--", "true"))
    state(rack, job, "done")
    assert rack.job(job)["times"]["started_wall_s"] >= began_s + 2.9


def test_the_files_of_the_examples_run(rack: LivingRack, tmp_path: Path) -> None:
    sweep = submitted(typed(rack, "submit", "--cwd", str(tmp_path), str(EXAMPLES / "files/sweep.sh")))
    hello = submitted(typed(rack, "submit", "--name", "other", str(EXAMPLES / "files/hello.toml")))
    for job in (sweep, hello):
        state(rack, job, "done")
    lines = sorted(path.read_text() for path in tmp_path.glob("sweep-j*.txt"))
    assert lines == [f"task {task} of 4, rank 0 of 1\n" for task in range(1, 5)]
    assert (rack.job(sweep)["name"], rack.job(hello)["name"]) == ("BERT_sweep", "other")
    assert "hello from rank 1 of 2" in typed(rack, "logs", hello)


# ---- Slurm's names ---------------------------------------------------------------------------------------------------


@pytest.fixture
def slurm(rack: LivingRack, tmp_path: Path) -> dict[str, str]:
    """An environment whose PATH has agentctl under Slurm's names."""
    names = tmp_path / "names"
    names.mkdir()
    for name in SLURM:
        (names / name).symlink_to(Path(sys.executable).with_name("agentctl"))
    (names / "srun").symlink_to(Path(SITE).parent / "slurm/srun")
    path = f"{names}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "COVEY_AGENT": rack.hosts[0].address}


def by_name(env: dict[str, str], *words: str, code: int = 0, cwd: Path | None = None, given: str = "") -> str:
    done = subprocess.run(words, env=env, cwd=cwd, input=given, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


def test_slurms_commands_are_agentctl_under_their_names(
    rack: LivingRack, slurm: dict[str, str], tmp_path: Path
) -> None:
    script = (
        "#!/bin/bash\n#SBATCH -n 2 --gres=gpu:2 -N1 -J two\nscontrol show hostnames $SLURM_JOB_NODELIST\nsleep 60\n"
    )
    said = by_name(slurm, "sbatch", "-t", "5", cwd=tmp_path, given=script)
    assert said.startswith("Submitted batch job ")
    number = said.split()[-1]
    state(rack, f"j{number}", "running")
    output = tmp_path / f"slurm-{number}.out"
    wait("its output", lambda: output.exists() and output.read_text().count("gpu") == 2, 20.0)
    assert by_name(slurm, "squeue", "-h", "-j", number, "-o", "%i %j %T %l %D").split() == [
        *(number, "two", "RUNNING", "5:00", "1")
    ]
    waits = by_name(slurm, "sbatch", "--parsable", f"--dependency=afterok:{number}", "--wrap", "true", cwd=tmp_path)
    assert "(Dependency)" in by_name(slurm, "squeue", "-t", "PENDING")
    assert "JobState=PENDING Reason=(Dependency)" in by_name(slurm, "scontrol", "show", "job", waits.strip())
    assert "covey*" in by_name(slurm, "sinfo")
    by_name(slurm, "scancel", number)
    state(rack, f"j{number}", "cancelled")
    assert "JobHeldUser" in by_name(slurm, "squeue", "-j", waits.strip())
    by_name(slurm, "scontrol", "release", waits.strip())
    state(rack, f"j{waits.strip()}", "done")
    told = by_name(slurm, "sacct", "-nP", "-j", f"{number},{waits.strip()}", "-o", "JobID,State,ExitCode")
    assert told.splitlines() == [f"{number}|CANCELLED|0:15", f"{waits.strip()}|COMPLETED|0:0"]
    for words, what in (
        (("squeue", "--usr", "x"), "squeue: unknown option --usr"),
        (("sbatch", "--gras=gpu:1", "x"), "unknown option --gras"),
        (("scancel",), "no job is named"),
        (("scontrol", "reboot"), "unknown command 'reboot'"),
        (("sacct", "-o", "Frob"), "invalid field Frob"),
        (("squeue", "-t", "X"), "invalid state X"),
    ):
        error = by_name(slurm, *words, code=2)
        assert what in error and len(error.splitlines()) == 3, error


def test_submitit_runs_functions_through_those_names(
    rack: LivingRack, slurm: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Judged by who did not write Covey: a job, its output, a failure, and an array."""
    submitit = pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", slurm["PATH"])
    monkeypatch.setenv("COVEY_AGENT", slurm["COVEY_AGENT"])
    executor = submitit.AutoExecutor(folder=tmp_path / "%j", cluster="slurm")
    executor.update_parameters(timeout_min=5, slurm_array_parallelism=2, nodes=1, tasks_per_node=1)
    one, wrong = executor.submit(pow, 2, 5), executor.submit(int, "x")
    assert one.result() == 32
    with pytest.raises(submitit.core.utils.FailedJobError):
        wrong.result()
    assert "ValueError" in (wrong.stderr() or "")
    jobs = executor.map_array(pow, [2, 3, 4], [2, 2, 2])
    assert [job.result() for job in jobs] == [4, 9, 16]
    assert all("_" in job.job_id for job in jobs)
