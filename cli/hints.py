"""What people type who know Slurm, Kubernetes, Ray or `docker`, and the command here that does it.

A hint is looked up by what a word means. A word that is in no table is taken for a slip only if it is nearly one that
there is: a hint that does something else is worse than none.
"""

from collections.abc import Collection, Iterable
from difflib import get_close_matches

NEARLY = 0.75
"""Likeness (`difflib`) from which on a word is a slip of another one: `hots` is, `drain` and `version` are not."""

NOUNS = {
    # hosts
    "host": "hosts", "node": "hosts", "nodes": "hosts", "member": "hosts", "members": "hosts", "sinfo": "hosts",
    "drain": "hosts drain HOST", "cordon": "hosts cordon HOST", "evacuate": "hosts drain HOST",
    "undrain": "hosts resume HOST", "uncordon": "hosts uncordon HOST", "resume": "hosts resume HOST",
    "give-up": "hosts give-up HOST",
    # GPUs
    "gpu": "gpus", "nvidia-smi": "gpus", "smi": "gpus", "watch": "top", "nvitop": "top", "htop": "top", "k9s": "top",
    # jobs
    "ps": "jobs", "queue": "jobs", "squeue": "jobs", "sacct": "history", "list": "jobs",
    "scontrol": "job ID", "sstat": "job ID", "inspect": "job ID", "show": "job ID", "get": "job ID",
    "log": "logs ID", "output": "logs ID", "tail": "logs ID -f", "follow": "logs ID -f",
    "explain": "why ID", "describe": "why ID", "events": "why ID", "sprio": "why ID", "reason": "why ID",
    "sbatch": "submit -- COMMAND", "srun": "run -- COMMAND",
    "salloc": "shell --gpus N", "launch": "submit -- COMMAND", "start": "submit -- COMMAND",
    "create": "submit -- COMMAND", "apply": "submit -- COMMAND", "ssh": "shell ID", "py-spy": "stacks ID",
    "kill": "cancel ID", "delete": "cancel ID", "stop": "cancel ID", "scancel": "cancel ID", "abort": "cancel ID",
    "rm": "cancel ID", "terminate": "cancel ID", "migrate": "move ID HOST",
    # remote memory
    "volumes": "volume ls", "vol": "volume ls", "lenders": "slabs", "attach": "volume create NAME SIZE",
    "detach": "volume rm NAME", "mount": "volume create NAME SIZE", "umount": "volume rm NAME",
    "swap": "volume swap NAME SIZE", "swapon": "volume swap NAME SIZE", "swapoff": "volume unswap NAME",
    "export": "volume export NAME --socket PATH", "unexport": "volume unexport NAME --socket PATH",
    "nbd": "volume export NAME --socket PATH",
    # the rack
    "aggregators": "tensors", "agg": "tensors", "sums": "tensors", "info": "status",
    "support": "bundle", "sosreport": "bundle", "dump": "bundle",
    "health": "doctor", "check": "doctor", "diagnose": "doctor", "quotas": "quota", "limits": "quota",
    "tenants": "tenant list", "account": "tenant list", "accounts": "tenant list", "users": "tenant list",
    "sacctmgr": "tenant list", "project": "tenant list", "projects": "tenant list",
    "init": "rack init", "join": "rack join HOST:PORT --token T", "join-token": "rack token", "token": "rack token",
    "key": "keys", "keyring": "keys", "rotate": "keys rotate",
    "voter": "voters", "quorum": "voters", "election": "leader", "master": "leader",
}  # fmt: skip
"""A word in the place of a noun -> the command that does it, without `agentctl`."""

SUBMIT_FLAGS = {
    # how many, and where
    "-n": "--workers N", "--ntasks": "--workers N", "--tasks": "--workers N", "--nproc-per-node": "--workers N",
    "--nproc_per_node": "--workers N", "--ntasks-per-node": "--nodes N", "--num-workers": "--workers N",
    "--replicas": "--workers N", "--np": "--workers N", "-N": "--nodes N", "--nnodes": "--nodes N",
    "--num-nodes": "--nodes N", "-G": "--gpus N", "--gres": "--gpus N", "--num-gpus": "--gpus N",
    "--gpus-per-task": "--gpus N", "--gpus-per-node": "--gpus N", "--gpus-per-worker": "--gpus N",
    "--exclusive": "--gpus N    (a GPU belongs to one job, unless its host shares GPUs)",
    "--contiguous": "--pack host", "--spread": "--pack any",
    "-o": "--output out-%j.txt", "--stdout": "--output out-%j.txt", "--stderr": "--error err-%j.txt",
    # how long, how often
    "-t": "--time 2h", "--time-limit": "--time 2h", "--walltime": "--time 2h", "--max-time": "--time 2h",
    "--requeue": "--retries N", "--max-retries": "--retries N", "--max-restarts": "--retries N",
    "--restarts": "--retries N", "--kill-wait": "--grace 60s", "--grace-period": "--grace 60s",
    "--signal": "--grace 60s    (SIGTERM first, and SIGKILL after this time)",
    "--dependency": "--after ok:ID", "-d": "--after ok:ID", "-a": "--array 0-99", "-b": "--begin 18:30",
    "--start": "--begin 18:30", "--held": "--hold", "-H": "--hold", "--mail-type": "--notify 'mail me'",
    # memory
    "--host-memory": "--mem 64GiB    (its name until now)",
    "--memory": "--mem 64GiB    (of all its processes on a host; --gpu-memory is of each GPU)",
    "--mem-per-gpu": "--mem 64GiB    (of all its processes on a host; --gpu-memory is of each GPU)",
    "--mem-per-cpu": "--mem 64GiB    (of all its processes on a host; there is no share for each core)",
    "--vram": "--gpu-memory 8GiB",
    # who, what, where from
    "-J": "--name NAME", "--job-name": "--name NAME", "-A": "--tenant NAME", "--account": "--tenant NAME",
    "--namespace": "--tenant NAME", "--project": "--tenant NAME", "--user": "--tenant NAME",
    "--qos": "--class guaranteed", "--priority": "--class guaranteed", "-p": "--class guaranteed",
    "--partition": "--class guaranteed", "--spot": "--class opportunistic", "--preemptible": "--class opportunistic",
    "--scavenger": "--class opportunistic", "-D": "--cwd DIR", "--chdir": "--cwd DIR", "--workdir": "--cwd DIR",
    "--working-dir": "--cwd DIR", "-e": "--env KEY=VAL", "--export": "--env KEY=VAL", "--env-vars": "--env KEY=VAL",
    "-W": "--wait", "-f": "--follow", "--pty": "--follow", "-i": "--follow", "--interactive": "--follow",
}  # fmt: skip
"""A flag of another tool -> ours, as it is written."""
OTHERWISE = {
    "-w": "agentctl hosts drain HOST    (a job does not choose its hosts; drain a host that must not be used)",
    "--nodelist": "agentctl hosts drain HOST    (a job does not choose its hosts; drain a host that must not be used)",
    "-x": "agentctl hosts drain HOST    (a job does not choose its hosts; drain a host that must not be used)",
    "--exclude": "agentctl hosts drain HOST    (a job does not choose its hosts; drain a host that must not be used)",
    "-c": "--cpus N    (of each worker)",
    "--cpus-per-task": "--cpus N    (of each worker)",
    "--num-cpus": "--cpus N    (of each worker)",
}
"""Flags of other schedulers that `submit` does not have, and how the same is done."""
FLAGS = {
    "-o": "--json", "--output": "--json", "--format": "--json", "-v": "--debug", "--verbose": "--debug",
    "--server": "--agent ADDRESS", "--address": "--agent ADDRESS", "-s": "--agent ADDRESS",
    "--no-color": "--color never", "--no-colour": "--color never", "--colour": "--color auto",
    "-t": "--timeout 30s", "--request-timeout": "--timeout 30s",
}  # fmt: skip
"""Flags that people try with every command, and ours."""
OF_NOUN = {
    "logs": {"-n": "--tail N", "--lines": "--tail N"},
    "jobs": {"--history": "--all", "--completed": "--all", "-u": "--user NAME", "-t": "--state queued",
             "--all-users": "--everyone", "-S": "--sort NAME", "--format": "--columns id,name"},
    "hosts": {"--force": "agentctl hosts give-up HOST", "--delete-emptydir-data": "--stop-jobs"},
    "cancel": {"--signal": "agentctl cancel ID    (SIGTERM, and SIGKILL after --grace of the job)"},
    "gpus": {"-l": "--watch", "--loop": "--watch"},
    "memory": {"attach": "agentctl volume swap NAME SIZE", "detach": "agentctl volume unswap NAME",
               "export": "agentctl volume export NAME --socket PATH",
               "unexport": "agentctl volume unexport NAME --socket PATH"},
    "volume create": {"--size": "agentctl volume create NAME SIZE", "--create": "--force"},
    "volume swap": {"--size": "agentctl volume swap NAME SIZE"},
    "volume rm": {"-f": "agentctl volume rm NAME    (it does not ask)",
                  "--force": "agentctl volume rm NAME    (it does not ask)"},
}  # fmt: skip
"""Command -> what is typed after it that it does not have -> what to type instead."""
VERBS = {
    "rack": {
        "create": "init", "start": "init", "new": "init", "begin": "init", "bootstrap": "init",
        "add": "token", "invite": "token", "join-token": "token", "tokens": "token",
    },
    "volume": {
        "list": "ls", "volumes": "ls", "add": "create NAME SIZE", "attach": "create NAME SIZE",
        "mk": "create NAME SIZE", "make": "create NAME SIZE", "map": "create NAME SIZE", "new": "create NAME SIZE",
        "open": "create NAME SIZE", "del": "rm NAME", "delete": "rm NAME", "destroy": "rm NAME", "detach": "rm NAME",
        "forget": "rm NAME", "remove": "rm NAME", "unmap": "rm NAME", "get": "show NAME", "info": "show NAME",
        "inspect": "show NAME", "stat": "show NAME", "status": "show NAME", "swapon": "swap NAME SIZE",
        "swapoff": "unswap NAME", "nbd": "export NAME --socket PATH", "serve": "export NAME --socket PATH",
        "unserve": "unexport NAME --socket PATH", "giveup": "give-up NAME",
    },
    "tenant": {
        "ls": "list", "show": "list", "get": "list", "users": "list", "create": "add TENANT --users A,B",
        "new": "add TENANT --users A,B", "make": "add TENANT --users A,B", "change": "set TENANT --add A,B",
        "modify": "set TENANT --add A,B", "update": "set TENANT --add A,B", "edit": "set TENANT --add A,B",
        "quota": "set TENANT --quota 8", "rm": "remove TENANT", "del": "remove TENANT", "delete": "remove TENANT",
        "drop": "remove TENANT",
    },
}  # fmt: skip
"""Noun -> a word in the place of its verb -> the verb that does it."""


def nearest(word: str, known: Collection[str]) -> str:
    """The word of those that there are which `word` is a slip of; empty: it is near none."""
    slips = [each for each in known if is_one_slip(word, each)]
    return next(iter(slips or get_close_matches(word, known, 1, NEARLY)), "")


def is_one_slip(word: str, meant: str) -> bool:
    """Whether one letter of `meant` is missing, too many or another one, or two neighbours are swapped. In a word of
    two letters only the last counts: most others are no slip of it."""
    if sorted(word) == sorted(meant):
        i, j = _ends_alike(word, meant)
        return j - i == 2
    longer, shorter = (word, meant) if len(word) >= len(meant) else (meant, word)
    i, j = _ends_alike(longer, shorter)
    return len(meant) > 2 and len(longer) - len(shorter) <= 1 and j - i <= 1


def _ends_alike(longer: str, shorter: str) -> tuple[int, int]:
    """From where to where the longer word differs from the shorter one: their beginnings and ends are the same."""
    start = 0
    while start < len(shorter) and longer[start] == shorter[start]:
        start += 1
    left = len(shorter)
    while left > start and longer[left - 1 + len(longer) - len(shorter)] == shorter[left - 1]:
        left -= 1
    return start, left + len(longer) - len(shorter)


def for_noun(word: str, nouns: Iterable[str]) -> str:
    """The command to type instead; empty when nothing is meant that there is."""
    near = nearest(word, [*nouns, *NOUNS])
    return NOUNS.get(word) or NOUNS.get(near, near)


def for_verb(noun: str, word: str, verbs: Iterable[str]) -> str:
    """The command to type instead of `noun word`, without `agentctl`; empty when nothing is meant that there is."""
    near = nearest(word, [*verbs, *VERBS[noun]])
    verb = VERBS[noun].get(word) or VERBS[noun].get(near, near)
    return f"{noun} {verb}" if verb else ""


def for_flag(noun: str, flag: str, known: Iterable[str]) -> str:
    """What to write instead of a flag that `noun` does not have; empty when nothing is known."""
    tables = [OTHERWISE, SUBMIT_FLAGS] if noun == "submit" else [OF_NOUN.get(noun, {})]
    for table in (*tables, FLAGS):
        if flag in table:
            return table[flag]
    near = nearest(flag, list(known)) if flag.startswith("--") else ""
    return f"did you mean {near}?" if near else ""
