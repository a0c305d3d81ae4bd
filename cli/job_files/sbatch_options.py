"""The options of Slurm's sbatch, as they stand in `#SBATCH` lines and after `sbatch`: which there are, what each is
here, and which are refused, in words.

    read: words -> Said (name -> value and place)          translated: Said -> options of `agentctl submit`, and notes

A script runs once in each task here, where Slurm runs it once and its `srun` in each; so `srun` in a script only runs
the command that follows it (`covey/hooks/slurm/srun`).
"""

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import NamedTuple, get_args

from cli.client import USAGE, AgentctlError
from plugins.scheduler.messages.options import GRACE_S_MAX, StopSignal

VALUE, FLAG, MAYBE = "value", "flag", "maybe"
"""Whether an option takes a value: always, never, or only after a `=`."""
SHORT = {
    "J": "job-name", "N": "nodes", "n": "ntasks", "c": "cpus-per-task", "G": "gpus", "t": "time", "o": "output",
    "e": "error", "D": "chdir", "a": "array", "d": "dependency", "b": "begin", "p": "partition", "A": "account",
    "q": "qos", "H": "hold", "W": "wait", "Q": "quiet", "v": "verbose", "x": "exclude", "w": "nodelist",
    "C": "constraint", "L": "licenses", "s": "oversubscribe", "k": "no-kill", "i": "input", "B": "extra-node-info",
    "F": "nodefile", "S": "core-spec", "M": "clusters", "O": "overcommit", "m": "distribution",
}  # fmt: skip
"""The letter of an option -> its long name."""
MAPPED = {
    **dict.fromkeys(
        ("job-name", "nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gres", "gpus", "gpus-per-node",
         "gpus-per-task", "mem", "mem-per-cpu", "mem-per-gpu", "time", "output", "error", "chdir", "account",
         "partition", "qos", "signal", "export", "export-file", "wrap", "array", "dependency", "begin"), VALUE),
    **dict.fromkeys(("hold", "requeue", "no-requeue", "wait", "parsable", "quiet"), FLAG),
}  # fmt: skip
"""Options that mean something here -> whether they take a value."""
NOTED = {
    "mail-type": (VALUE, "nobody gets mail: agentctl submit --notify CMD|URL tells a program instead"),
    "mail-user": (VALUE, ""),
    "exclusive": (MAYBE, "a GPU belongs to one job, unless its host shares GPUs; processors are asked for with -c"),
    "comment": (VALUE, ""),
    "wckey": (VALUE, ""),
    "open-mode": (VALUE, "output is always added to what is there"),
    "verbose": (FLAG, ""),
    "oversubscribe": (FLAG, ""),
    "no-kill": (MAYBE, ""),
    "get-user-env": (MAYBE, ""),
    "kill-on-invalid-dep": (VALUE, "a job whose dependency failed is held, and agentctl why says so"),
    "gres-flags": (VALUE, ""),
    "gpu-bind": (VALUE, "each task sees the GPUs of its job on the host, its own first"),
    "cpu-bind": (VALUE, ""),
    "mem-bind": (VALUE, ""),
    "hint": (VALUE, ""),
    "threads-per-core": (VALUE, ""),
    "distribution": (VALUE, "Covey places tasks on the fewest hosts that have room"),
    "overcommit": (FLAG, ""),
    "deadline": (VALUE, "a job that has not started by then is not ended: agentctl cancel"),
    "profile": (VALUE, ""),
    "acctg-freq": (VALUE, ""),
    "ignore-pbs": (FLAG, ""),
    "export-user-env": (FLAG, ""),
}
"""Options that change nothing here -> whether they take a value, and what to know of that; empty: nothing."""
REFUSED = {
    "nodelist": "a job does not choose its hosts; agentctl hosts cordon HOST keeps jobs from one",
    "exclude": "a job does not choose its hosts; agentctl hosts cordon HOST keeps jobs from one",
    "nodefile": "a job does not choose its hosts; agentctl hosts cordon HOST keeps jobs from one",
    "constraint": "hosts have no features here",
    "licenses": "Covey counts GPUs, memory and processors, and no licenses",
    "reservation": "there are no reservations here; quotas are: agentctl quota",
    "nice": "places change by agentctl priority JOB --up|--down",
    "priority": "places change by agentctl priority JOB --up|--down",
    "input": "ranks read nothing from their standard input: let the script open the file",
    "clusters": "there is one rack: agentctl --agent ADDRESS asks another one",
    "extra-node-info": "cores are asked for with -c, for each task",
    "core-spec": "cores are asked for with -c, for each task",
    "ntasks-per-gpu": "say how many tasks there are: --ntasks N",
    "ntasks-per-core": "cores are asked for with -c, for each task",
    "ntasks-per-socket": "cores are asked for with -c, for each task",
    "gpus-per-socket": "say how many GPUs each host, or each task, has: --gpus-per-node N, --gpus-per-task N",
    "sockets-per-node": "cores are asked for with -c, for each task",
    "cores-per-socket": "cores are asked for with -c, for each task",
    "cpus-per-gpu": "processors are asked for with -c, for each task",
    "mincpus": "processors are asked for with -c, for each task",
    "tmp": "no disk is set aside for jobs; --private-tmp of agentctl submit gives a /tmp of its own",
    "test-only": "nothing is submitted by half",
    "switches": "hosts are chosen by their free GPUs",
    "time-min": "a job has one time limit: --time",
    "uid": "the kernel says whose job it is",
    "gid": "the kernel says whose job it is",
}
"""Options that are refused, and why."""


class Given(NamedTuple):
    """An option's value, and where it stands (`job.sh line 3`, `sbatch`)."""

    value: str
    place: str


Said = dict[str, Given]
"""Options of sbatch by their long names."""


class Translated(NamedTuple):
    """What `agentctl submit` is told instead."""

    words: list[str]
    """Options of `agentctl submit`."""
    notes: list[str]
    """What is other than in Slurm, for people."""


def read(words: Sequence[str], place: str) -> tuple[Said, list[str]]:
    """The options that these words begin with, and the words after them. AgentctlError names a wrong one."""
    found: Said = {}
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        name, equals, value = word.lstrip("-").partition("=") if word.startswith("--") else (word[1:2], "", word[2:])
        if not word.startswith("--"):
            name, equals = SHORT.get(name, ""), "=" if value else ""
            value = value.removeprefix("=")
        takes = takes_of(name)
        if takes is None:
            raise unknown(word, place)
        if name in REFUSED:
            raise wrong(place, f"{word.partition('=')[0]} is refused", REFUSED[name], "leave it out")
        if takes == VALUE and not equals:
            if not rest:
                raise wrong(place, f"{word} has no value", f"expected --{name}=VALUE", f"correct {place}")
            value = rest.pop(0)
        if takes == FLAG and equals:
            raise wrong(place, f"invalid {word}", f"--{name} takes no value", f"--{name}")
        found[name] = Given(value, place)
    return found, rest


def takes_of(name: str) -> str | None:
    """Whether an option takes a value; None: there is no such option."""
    if name in MAPPED:
        return MAPPED[name]
    if name in NOTED:
        return NOTED[name][0]
    return MAYBE if name in REFUSED else None


def unknown(word: str, place: str) -> AgentctlError:
    flag = word.partition("=")[0]
    names = [f"--{name}" for name in (*MAPPED, *NOTED, *REFUSED)]
    near = get_close_matches(flag, names, 1, 0.6)
    step = f"did you mean {near[0]}?" if near else "options of Covey stand in #COVEY lines: agentctl submit --help"
    return wrong(place, f"unknown option {flag}", "sbatch has no such option that is known here", step)


def wrong(place: str, what: str, why: str, next: str) -> AgentctlError:
    return AgentctlError(USAGE, f"{place}: {what}", why, next)


def translated(said: Mapping[str, Given]) -> Translated:
    """Options of `agentctl submit` that ask for what these do. AgentctlError names what cannot be had, and where it
    stands."""
    words: list[str] = []
    notes = [f"{at.place}: --{name}: {NOTED[name][1]}" for name, at in said.items() if NOTED.get(name, ("", ""))[1]]
    words += _gang(said, notes)
    for name, flag in (("job-name", "--name"), ("account", "--tenant"), ("chdir", "--cwd")):
        if name in said:
            words += [flag, said[name].value]
    for name in ("output", "error"):
        if name in said and said[name].value not in ("none", "/dev/null"):
            words += [f"--{name}", output_name(said[name])]
    if "time" in said and (seconds := time_of(said["time"])) is not None:
        words += ["--time", f"{seconds}s"]
    words += _ending(said, notes)
    words += _environment(said)
    if "partition" in said:
        notes.append(f"{said['partition'].place}: partition {said['partition'].value}: Covey has none; any host may do")
    if "qos" in said:
        words += _class(said["qos"], notes)
    if "array" in said:
        words += ["--array", said["array"].value]
    if "dependency" in said:
        words += ["--after", after_of(said["dependency"])]
    if "begin" in said:
        words += ["--begin", said["begin"].value]
    words += [f"--{name}" for name in ("hold", "wait") if name in said]
    return Translated(words, notes)


def _gang(said: Mapping[str, Given], notes: list[str]) -> list[str]:
    """Tasks, hosts, GPUs, processors and memory."""
    hosts, tasks, each = (_count(said, name) for name in ("nodes", "ntasks", "ntasks-per-node"))
    if tasks is None:
        tasks = (hosts or 1) * (each or 1) if hosts or each else _tasks_by_gpus(said)
    if hosts is None and each:
        hosts = -(-tasks // each)
    if hosts is not None and tasks < hosts:
        hosts = tasks
    if hosts and each and tasks > hosts * each:
        what = f"{tasks} tasks do not fit on {hosts} hosts with {each} each"
        raise wrong(said["ntasks"].place, what, "--ntasks is all tasks together", "leave --ntasks or --nodes out")
    words = _placed(hosts, tasks, said, notes)
    words += ["--gpus", str(_gpus(said, tasks, hosts))]
    cpus = _count(said, "cpus-per-task")
    words += ["--cpus", str(cpus)] if cpus else []
    memory = _memory(said, cpus or 1, -(-tasks // (hosts or tasks)), _gpus(said, tasks, hosts))
    return [*words, "--mem", f"{memory}MiB"] if memory else words


def _placed(hosts: int | None, tasks: int, said: Mapping[str, Given], notes: list[str]) -> list[str]:
    if hosts is not None and hosts == tasks > 1:
        return ["--nodes", str(tasks)]
    if hosts == 1 and tasks > 1:
        return ["--workers", str(tasks), "--pack", "host"]
    if hosts is not None and hosts > 1:
        at = said.get("nodes") or said["ntasks-per-node"]
        notes.append(f"{at.place}: {tasks} tasks go to the fewest hosts that have room, which may not be {hosts}")
    return ["--workers", str(tasks)]


def _tasks_by_gpus(said: Mapping[str, Given]) -> int:
    """Tasks where only GPUs are said: as many as `--gpus` over `--gpus-per-task`."""
    if "gpus" not in said or "gpus-per-task" not in said:
        return 1
    return max(1, gpus_of(said["gpus"], "gpus") // max(1, gpus_of(said["gpus-per-task"], "gpus-per-task")))


def _gpus(said: Mapping[str, Given], tasks: int, hosts: int | None) -> int:
    """GPUs of each task."""
    if "gpus-per-task" in said:
        return gpus_of(said["gpus-per-task"], "gpus-per-task")
    name = next((name for name in ("gpus", "gpus-per-node", "gres") if name in said), "")
    if not name:
        return 0
    count = gpus_of(said[name], name)
    whole = count if name == "gpus" else count * (hosts or 1)
    if whole % tasks:
        what = f"--{name}={said[name].value}: {whole} GPUs for {tasks} tasks"
        raise wrong(said[name].place, what, "each task has the same number of GPUs here", "--gpus-per-task N")
    return whole // tasks


def gpus_of(given: Given, name: str) -> int:
    """The number in `gpu:2`, `gpu:a100:2`, `a100:2` or `2`."""
    parts = given.value.split(":")
    if name == "gres" and (parts[0] not in ("gpu", "none") or "," in given.value):
        why = "Covey counts GPUs and no other resource: expected gpu:N"
        raise wrong(given.place, f"invalid --gres={given.value}", why, "--gres=gpu:1")
    if parts == ["gpu"]:
        return 1
    if parts == ["none"]:
        return 0
    if not (parts[-1].isascii() and parts[-1].isdigit()):
        example = "--gres=gpu:2" if name == "gres" else f"--{name}=2"
        raise wrong(given.place, f"invalid --{name}={given.value}", "expected a number of GPUs", example)
    return int(parts[-1])


def _count(said: Mapping[str, Given], name: str) -> int | None:
    if name not in said:
        return None
    value, place = said[name]
    if not (value.isascii() and value.isdigit() and 0 < int(value) < 1 << 20):
        why = "expected one whole number over 0"
        raise wrong(place, f"invalid --{name}={value}", why, f"--{name}={value.partition('-')[0] or 2}")
    return int(value)


def _memory(said: Mapping[str, Given], cpus: int, tasks_here: int, gpus: int) -> int:
    """MiB of one host; 0: not said."""
    times = {"mem": 1, "mem-per-cpu": cpus * tasks_here, "mem-per-gpu": gpus * tasks_here}
    name = next((name for name in times if name in said), "")
    if not name:
        return 0
    value, place = said[name]
    found = re.fullmatch(r"(\d{1,12})([KMGT]?)B?", value.upper())
    if found is None:
        raise wrong(place, f"invalid --{name}={value}", "expected a number with K, M, G or T", f"--{name}=16G")
    mib = {"K": 1 / 1024, "M": 1, "": 1, "G": 1024, "T": 1024 * 1024}[found[2]] * int(found[1])
    return -(-int(mib * times[name] * 1024) // 1024)


def time_of(given: Given) -> int | None:
    """Seconds of Slurm's forms of a time: minutes, minutes:seconds, hours:minutes:seconds, and days- before hours with
    or without the rest. None: without limit."""
    text = given.value.strip()
    if text.upper() in ("UNLIMITED", "INFINITE", "0", "-1"):
        return None
    found = re.fullmatch(r"(?:(\d{1,6})-)?(\d{1,9})(?::(\d{1,4}))?(?::(\d{1,4}))?", text)
    if found is None:
        why = "expected minutes, minutes:seconds, hours:minutes:seconds, days-hours or days-hours:minutes:seconds"
        raise wrong(given.place, f"invalid --time={text}", why, "--time=2:00:00 is two hours")
    days, one, two, three = (None if part is None else int(part) for part in found.groups())
    if days is not None:
        seconds = ((days * 24 + (one or 0)) * 60 + (two or 0)) * 60 + (three or 0)
    elif three is not None:
        seconds = ((one or 0) * 60 + (two or 0)) * 60 + three
    else:
        seconds = (one or 0) * 60 + (two or 0)
    return seconds or None


def after_of(given: Given) -> str:
    """The value of `--after` for `afterok:1:2,afterany:3`."""
    found: list[str] = []
    for part in given.value.split(","):
        kind, *jobs = part.split(":")
        ours = {"afterok": "ok", "afterany": "any"}.get(kind)
        if ours is None or not jobs or "?" in part:
            known = ("afterok:JOB", "afterany:JOB")
            near = get_close_matches(kind, ("afterok", "afterany"), 1, 0.6)
            step = (
                f"did you mean {near[0]}:JOB?"
                if near and kind not in OTHER_DEPENDENCIES
                else f"--dependency={known[0]}"
            )
            why = OTHER_DEPENDENCIES.get(kind, f"expected {' or '.join(known)}, with commas between them")
            raise wrong(given.place, f"invalid --dependency={given.value}", why, step)
        for job in jobs:
            if not re.fullmatch(r"j?[1-9]\d{0,17}", job):
                why = "expected a job's id, such as 12"
                raise wrong(given.place, f"invalid --dependency={given.value}", why, f"--dependency={kind}:12")
            found.append(f"{ours}:j{job.removeprefix('j')}")
    return ",".join(found)


OTHER_DEPENDENCIES = {
    "after": "a job waits here for the end of others, and not for their start",
    "afternotok": "a job waits here for others to be done (afterok), or to end (afterany)",
    "aftercorr": "a job waits here for a whole array, and not for tasks of it",
    "afterburstbuffer": "there are no burst buffers here",
    "singleton": "name the jobs that must end first: --dependency=afterany:ID",
}
"""Kinds of dependencies that Slurm has and Covey has not, and why they are refused."""
OUTPUT_WORDS = {"j": "%i", "A": "%A", "a": "%a", "x": "%x", "N": "%N", "u": "%u", "t": "%r", "n": "%r", "%": "%%"}
"""Slurm's words in names of output -> ours. Slurm's ids are numbers."""


def output_name(given: Given) -> str:
    """The name of a file for output with our words."""

    def ours(found: re.Match[str]) -> str:
        if found[1] or found[2] not in OUTPUT_WORDS:
            known = ", ".join(f"%{word}" for word in OUTPUT_WORDS)
            raise wrong(given.place, f"{given.value} has {found[0]}", f"expected one of {known}", "%j is the job's id")
        return OUTPUT_WORDS[found[2]]

    return re.sub(r"%(\d*)(.?)", ours, given.value)


def _ending(said: Mapping[str, Given], notes: list[str]) -> list[str]:
    """When a job is started again, and how it is asked to end."""
    if "no-requeue" in said:
        notes.append(f"{said['no-requeue'].place}: --no-requeue: a job that yields is started again (exit 75 as well)")
    if "signal" not in said:
        return []
    value, place = said["signal"]
    found = re.fullmatch(r"(?:[BR]{1,2}:)?(?:SIG)?([A-Z0-9]+)(?:@(\d{1,5}))?", value.upper())
    if found is None:
        raise wrong(place, f"invalid --signal={value}", "expected SIGNAL@SECONDS", "--signal=TERM@120")
    signals: Sequence[str] = get_args(StopSignal)
    name = {str(signal.Signals[f"SIG{name}"].value): name for name in signals}.get(str(found[1]), str(found[1]))
    if name not in signals:
        why = f"a job is asked to end by one of {', '.join(signals)}"
        raise wrong(place, f"invalid --signal={value}", why, "--signal=USR1@120")
    seconds = int(found[2] or 60)
    words = ["--stop-signal", name, "--grace", f"{min(seconds, GRACE_S_MAX)}s"]
    limit_s = time_of(said["time"]) if "time" in said else None
    if limit_s is not None and 0 < seconds < limit_s:
        words += ["--signal-before", f"{seconds}s"]
    elif seconds > GRACE_S_MAX:
        notes.append(f"{place}: --signal={value}: SIGKILL comes {GRACE_S_MAX} s after {name}")
    return words


def _environment(said: Mapping[str, Given]) -> list[str]:
    words: list[str] = []
    if "export-file" in said:
        words += ["--env-file", said["export-file"].value]
    if "export" not in said:
        return words
    parts = [part for part in said["export"].value.split(",") if part]
    if "ALL" not in parts and "NIL" not in parts:
        words.append("--no-env")
    for part in parts:
        if part not in ("ALL", "NONE", "NIL"):
            words += ["--env", part]
    return words


def _class(given: Given, notes: list[str]) -> list[str]:
    classes = ("guaranteed", "auto", "opportunistic")
    if given.value in classes:
        return ["--class", given.value]
    notes.append(f"{given.place}: qos {given.value}: Covey has classes: {', '.join(classes)} (--class)")
    return []


def merged(parts: Iterable[Said]) -> Said:
    """All options; of one that is said twice the last holds."""
    found: Said = {}
    for part in parts:
        for name, given in part.items():
            found.pop(name, None)
            found[name] = given
    return found
