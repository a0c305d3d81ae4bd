"""The pages of docs/reference/ that the code determines, and the site.

python -m tools.pages            writes docs/reference/*.md; `make reference` runs it
python -m tools.pages DIR        builds the site into DIR: pages by mkdocs, with every link checked, and the API pages
                                of docstrings by pdoc in DIR/api; `make docs` runs it

A test compares the written pages with what the code says now (tests/docs/test_reference.py). When the site is built,
mkdocs loads this file as a hook, which puts pictures in the place of Mermaid diagrams, so that no script draws them in
the browser.
"""

import argparse
import ast
import base64
import copy
import importlib
import inspect
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pdoc
from aiohttp import web

import covey
from agent.api.access import RULES
from agent.api.admission import OwnSocket
from agent.api.exposition import declared
from agent.api.http import Arguments, HttpApi, Route
from agent.config import HttpSettings
from cli import client
from cli.examples import EXAMPLES
from cli.main import MODULES as CLI
from cli.main import NOUNS, VERBS, Parser

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs/reference"
MODULES = (
    "covey",
    "covey.job.client",
    "covey.core.errors",
    "covey.remote",
    "covey.tensors.numbers.moments",
    "covey.job.tensors",
    "covey.tensors.numbers.updates",
    "plugins.base",
    "plugins.views",
)
"""Modules that a training script imports, that a plugin is made of, and whose structs JSON programs see."""
PYTHON = {
    "covey": covey.__all__,
    "covey.job.tensors": ["TensorClient"],
    "covey.torch": ["attach", "init_process_group", "StepSampler", "HealedTraining", "attached"],
    "covey.jax": ["psum", "pmean", "state"],
    "covey.callbacks": ["ForTrainer", "ForLightning", "ForAccelerator", "ForTensorBoard", "ForWandb", "last_of"],
    "covey.remote": ["RemoteArray"],
}
"""Module -> its public names. Those of PyTorch and JAX are read from source, since neither need be installed."""
FOUND_IN = {
    "covey.torch.init_process_group": "covey.frameworks.torch.group",
    "covey.torch.StepSampler": "covey.frameworks.torch.sampler",
    "covey.torch.HealedTraining": "covey.frameworks.torch.heal",
    "covey.callbacks.ForTrainer": "covey.callbacks.for_trainer",
    "covey.callbacks.ForLightning": "covey.callbacks.for_lightning",
    "covey.callbacks.ForAccelerator": "covey.callbacks.for_accelerator",
    "covey.callbacks.ForTensorBoard": "covey.callbacks.for_logs",
    "covey.callbacks.ForWandb": "covey.callbacks.for_logs",
    "covey.callbacks.last_of": "covey.callbacks.for_trainer",
    "covey.remote.RemoteArray": "covey.arrays.remote_array",
}
"""Name -> the module that defines it, where another one offers it."""
ROUTES = {
    "GET /v1/hosts": "the hosts of the rack, their state, what each can spare",
    "GET /v1/leader": "who leads, and since when",
    "GET /v1/memory/accounts": "remote memory lent to each tenant and job, as this host hears it",
    "GET /v1/history": "jobs that have ended, `?user= tenant= name= state= host= since_wall_s= limit=`",
    "GET /v1/report": "GPU-seconds held, used, idle and lost, `?by=user|tenant|gpu` and as above",
    "GET /v1/jobs/{id}/report": "what became of one job's GPU-seconds; for its owner",
    "GET /v1/quotas": "the quota of each tenant, and what it holds",
    "GET /v1/tenants": "the tenants, their users, and their quotas",
    "GET /v1/status": "the answering agent, its plugins, its notes",
    "GET /v1/gpus": "every GPU of the rack, and who holds it",
    "GET /v1/interference": "what jobs on one GPU cost the guaranteed one",
    "GET /v1/groups": "jobs that share hosts in turns, group by group",
    "GET /v1/shared_gpus": "every GPU that jobs share, and what each may do there",
    "GET /v1/slabs": "which slab of which volume lies where",
    "GET /v1/tensors": "which aggregator sums the tensors of which job",
    "GET /v1/volumes": "the volumes of remote memory, and their traffic",
    "GET /v1/links": "how this host reaches each other one: round trip, offset of its clock, long messages",
    "GET /v1/hosts/{id}/ping": "how the answering host reaches another: round trip, and over what pages and tensors go",
    "GET /v1/gossip": "what each host sends and hears of the others, whom it knows to be suspected, what it drops",
    "GET /v1/keys": "which keys of gossip each host has, by their hash",
    "GET /v1/voters": "which hosts vote, how far each has the log, which change is under way",
    "GET /v1/jobs": "jobs that wait or run; `?all=1`: ended ones too; `mine=1`, `user`, `state`, `name` (patterns), "
    "`tenant`: which (several with commas between them); `sort` (`-time`: descending), `limit`",
    "GET /v1/events": "lists as a stream of server-sent events, whole and then what changes: `?tables=hosts,jobs,...`",
    "GET /v1/starts": "when jobs that wait will start, p50 and p90, and from what that is known; `?job=`: one of them",
    "GET /v1/jobs/{id}": "one job",
    "GET /v1/jobs/{id}/curve": "the job's step time and metrics over its steps, at most 512 points",
    "GET /v1/jobs/{id}/env": "the environment of a job that is not over, secrets hidden; for its owner and operators",
    "GET /v1/jobs/{id}/logs": "what a rank wrote, from an offset on",
    "GET /v1/why/{id}": "all events of one job, slab, volume or host",
    "GET /livez": "200 while the agent's loop turns",
    "GET /readyz": "200 once the agent has joined and its plugins run",
    "GET /healthz": '`{"ok": true}`, or 503 when a plugin has failed',
    "GET /metrics": "metrics for Prometheus (see [metrics](metrics.md))",
    "GET /states.json": "the colour of each state, for the page",
    "POST /v1/jobs": "submit a job",
    "POST /v1/starts": "when a job would start that is submitted now, which it is not: the same body",
    "POST /v1/jobs/{id}/cancel": "end a job, or tasks of an array (`tasks`: `3-7,9`)",
    "POST /v1/jobs/{id}/hold": "keep a job that waits from starting",
    "POST /v1/jobs/{id}/priority": "let a waiting job come before the others of its tenant (`up`), or behind them",
    "POST /v1/jobs/{id}/release": "let a held job start",
    "POST /v1/jobs/{id}/requeue": "stop a job and queue it again; `hold`: and hold it; `test`: to try its handler",
    "POST /v1/jobs/{id}/checkpoint": "let a job save and go on; again with its `number`: how far that is",
    "POST /v1/jobs/{id}/update": "change a job's time limit (`time_limit_s`)",
    "POST /v1/jobs/{id}/move": "move a job's ranks from one host to another",
    "POST /v1/jobs/{id}/scale": "give an elastic job more or fewer processes",
    "POST /v1/jobs/{id}/arrange": "say where the processes of an elastic job are, how many of its ranks each host "
    "carries, and which host owns each table of its tensors",
    "POST /v1/jobs/{id}/tune": "let the tuner divide an elastic job's ranks and tables among its hosts, or stop it",
    "GET /v1/jobs/{id}/tuner": "what the tuner of a job measured and decided",
    "POST /v1/jobs/{id}/sessions": "begin a command (`argv`), a shell or a connection to a port beside a rank",
    "POST /v1/jobs/{id}/turn": "bring input to such a session, and output from it (`agent/jobs/beside/messages.py`)",
    "POST /v1/jobs/{id}/stacks": "the Python stacks of all ranks, which run on",
    "POST /v1/gpus/{id}/forget": "forget a GPU that was taken out or reset",
    "POST /v1/hosts/{id}/give-up": "say that a lost host will not come back",
    "POST /v1/hosts/{id}/drain": "have everything leave a host",
    "POST /v1/hosts/{id}/resume": "use a drained or cordoned host again",
    "POST /v1/hosts/{id}/cordon": "have no rank start on a host; what is there stays",
    "POST /v1/hosts/{id}/uncordon": "let ranks start on a cordoned host again",
    "POST /v1/hosts/{id}/forget": "forget a host that will never come back: its vote, its jobs, its row",
    "POST /v1/volumes": "create a volume; one of this name and size that exists is used",
    "DELETE /v1/volumes/{id}": "remove a volume and everything in it",
    "POST /v1/volumes/{id}/give-up": "stop waiting for lenders that do not answer",
    "POST /v1/volumes/{id}/export": "start or stop serving a volume over NBD",
    "POST /v1/volumes/{id}/swap": "use a volume as swap of its host, or stop that",
    "POST /v1/keys/turn": "take the next step of a rotation of keys on every host, or the `step` of the key `id`",
    "POST /v1/login": "make a certificate for the user who asks, by a request `csr`, for `days`",
    "POST /v1/tokens": "make a token, by which one host can join within an hour",
    "POST /v1/tensors/move": "move a table of a job's tensors to another aggregator",
    "POST /v1/voters": "add, remove or replace a voter",
    "POST /v1/quotas": "set a tenant's quota",
    "POST /v1/tenants": "set, add or remove the users of a tenant, and its quota",
}
"""What each route of the API answers or does. The page itself and what it loads are left out."""
MERMAID = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHARED = ("--help", "--json", "--agent", "--timeout", "--color", "--debug")
EXITS = {
    "OK": "done",
    "FAILED": "error",
    "USAGE": "wrong usage",
    "NOT_FOUND": "not found",
    "REFUSED": "refused; the reason and the next step are on stderr",
    "NO_AGENT": "no agent answers",
    "TOO_LATE": "the deadline passed (`--timeout`)",
    "IMPOSSIBLE": "the job can never be placed on this rack",
    "NOT_WHOLE": "some hosts did not answer, so the list lacks them; they are named on stderr",
    "TRY_AGAIN": "not now, for instance because no leader is elected; try again",
}
"""What each exit code of agentctl means, by its name in cli/client.py."""


def head(title: str, text: str) -> Iterator[str]:
    yield from (f"# {title}", "", f"*Generated from the code by `make reference`; do not edit.* {text}", "")


# ---- agentctl ----


def agentctl() -> Iterator[str]:
    shared = "`--json` (for programs, errors too), `--agent unix:PATH | http://HOST:PORT`, `--timeout TIME`"
    yield from head("agentctl", f"Every command also takes {shared}, `--color` and `--debug`.")
    for noun in NOUNS:
        if noun in VERBS:
            yield from (f"## {noun}", "", said(importlib.import_module(f"cli.{noun}")), "")
            yield from ("| command | what it does |", "|---|---|")
            yield from (f"| [{noun} {verb}](#{noun}-{verb}) | {text} |" for verb, text in VERBS[noun].items())
            yield ""
        for command in [f"{noun} {verb}" for verb in VERBS[noun]] if noun in VERBS else [noun]:
            module = importlib.import_module(CLI[command])
            parser = Parser(f"agentctl {command}", add_help=False)
            module.arguments(parser)
            yield from (f"{'###' if noun in VERBS else '##'} {command}", "")
            yield from usage_of(module, parser)
            yield from ("```text", *EXAMPLES[command], "```", "")


def usage_of(module: Any, parser: Parser) -> Iterator[str]:
    """One command: how it is typed, what it does, and its arguments."""
    usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
    yield from ("```text", *textwrap.wrap(usage, 112, subsequent_indent="    "), "```", "")
    yield from (said(module), "")
    options = [action for action in parser._actions if action.help and action.help != argparse.SUPPRESS]
    yield from (f"- `{name_of(action)}`: {help_of(action)}" for action in options)
    yield from ("",) if options else ()


def said(module: Any) -> str:
    """The module's docstring as Markdown: paragraphs without the breaks of their lines, and tables unchanged."""
    return "\n\n".join(map(paragraph, inspect.cleandoc(module.__doc__ or "").split("\n\n")))


def paragraph(text: str) -> str:
    if re.search(r"\S {3,}\S", text):
        return f"```text\n{text}\n```"
    return " ".join(line.strip() for line in text.splitlines())


def name_of(action: argparse.Action) -> str:
    name = action.option_strings[-1] if action.option_strings else str(action.metavar or action.dest)
    if action.choices and not action.option_strings:
        return "|".join(map(str, action.choices))
    takes = action.metavar or ("|".join(map(str, action.choices)) if action.choices else "")
    return f"{name} {takes}".strip() if action.option_strings and action.nargs != 0 else name


def help_of(action: argparse.Action) -> str:
    text = " ".join(str(action.help).split()).replace("%%", "%")
    return text.replace("|", "\\|")


# ---- metrics ----


WATCHED = (
    *("covey_hosts", "covey_hosts_wrong", "covey_has_leader", "covey_leads", "covey_gpu_takes_jobs"),
    *("covey_jobs_wait_longest_seconds", "covey_disk_free_bytes", "covey_volumes_in_trouble"),
    *("covey_slabs_unrecovered_total", "covey_plugins_failed", "covey_gossip_alone"),
)
"""The metrics to watch first."""


def metrics() -> Iterator[str]:
    yield from head(
        "Metrics",
        "`GET /metrics` of every agent answers in Prometheus' text format, each metric with its help. How to scrape: "
        "[install](../guides/install.md#http-and-prometheus). What others may read there: "
        "[security](../guides/security.md#what-metrics-show). A dashboard for Grafana and alerts for Prometheus are "
        "in `deploy/`: [a day's work](../guides/day-two.md#dashboard-and-alerts).",
    )
    assert {metric.name for metric in declared()}.issuperset(WATCHED)
    yield from (
        f"Watch first: {', '.join(f'`{name}`' for name in WATCHED)}.",
        "",
        "A figure that is not known has no series, never 0. Every metric has at most 256 series on a host; "
        "`covey_series_left_out` counts what is left out. Labels are never names of users, jobs or volumes, nor "
        "anything that a job said.",
        "",
        *("| metric | kind | labels | meaning |", "|---|---|---|---|"),
    )
    for metric in sorted(declared(), key=lambda each: each.name):
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        yield f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |"
    yield ""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A hook of mkdocs, which calls it by this name for each page."""
    return MERMAID.sub(drawn, markdown)


def drawn(diagram: re.Match[str]) -> str:
    """The picture of a Mermaid diagram, in the page itself; on white, whatever the page's colours are."""
    import mmdr

    kind, svg = diagram[1].partition("\n")[0], mmdr.render(diagram[1]).svg()
    data = base64.b64encode(svg.encode()).decode()
    return f'<img alt="{kind}" style="background: white" src="data:image/svg+xml;base64,{data}">'


# ---- HTTP ----


class NobodyAsks:
    """A stand-in for the agent behind the API: routes are listed, and none is asked."""

    id = None

    async def asker(self, _uid: int) -> None:
        return None


class ListedApi(HttpApi):
    """The API, with the command of each of its routes."""

    def __init__(self) -> None:
        super().__init__(NobodyAsks(), "", HttpSettings())  # type: ignore[arg-type]
        self.command_of: dict[object, str] = {}

    def _ask(self, name: str, arguments: Arguments) -> Route:
        route = super()._ask(name, arguments)
        self.command_of[route] = name
        return route


def routes() -> dict[str, str]:
    """`METHOD path` of each route that the unix socket has, in the order in which they are added -> its command; empty:
    it has none."""
    api = ListedApi()
    app = api._app(OwnSocket(0, NobodyAsks().asker))
    found: dict[str, str] = {}
    for route in app.router.routes():
        resource = route.resource
        assert isinstance(resource, web.Resource)
        path = re.sub(r"\{(\w+):[^}]*\}", r"{\1}", resource.canonical)
        if route.method != "HEAD" and (path.startswith("/v1/") or path.rpartition("/")[2] in PLAIN):
            found[f"{route.method} {path}"] = api.command_of.get(route.handler, "")
    return found


PLAIN = ("livez", "readyz", "healthz", "metrics", "states.json")
"""Routes outside /v1 that are not parts of the page."""


def http() -> Iterator[str]:
    yield from head(
        "HTTP API",
        "JSON over the agent's unix socket `agent.sock`, and over TCP where `[http] bind` says so. "
        "Without TLS only GET exists there. Lists take `?timeout_s=` (how long to wait for hosts that are late) and "
        "name hosts that did not answer under `unanswered`. An error has `code`, `what`, `why` and `next`. "
        "Who asks is the user whom the kernel tells, or over TLS the one whom a certificate names "
        "([users](../guides/users.md#who-may-ask)). Operators may do everything but log in as root; whoever connects "
        "over TCP without a certificate is a viewer. "
        "The fields of each answer are those of `plugins/views.py` (in the site: `api/plugins/views.html`).",
    )
    yield from ("| route | for | answer or effect |", "|---|---|---|")
    for route, command in sorted(routes().items(), key=lambda each: each[0].split()[::-1]):
        yield f"| `{route}` | {FOR[RULES[command].needs] if command else FOR['look']} | {ROUTES[route]} |"
    yield ""


FOR = {
    "look": "viewers",
    "log in": "users of the host",
    "use": "users with a tenant",
    "own": "its owner",
    "operate": "operators",
}
"""Who may ask, in the words of the page, by what the command needs."""


# ---- Python ----


def python() -> Iterator[str]:
    yield from head(
        "Python API",
        "The public names, each with the first sentence of its docstring. "
        "The site has the whole docstrings under `api/`.",
    )
    for module, names in PYTHON.items():
        yield from (f"## {module}", "")
        for name in names:
            yield from described(module, name)
        yield ""


SENTENCE_MAX = 120
"""Most characters of a sentence; of a longer one only what is before its first semicolon is shown."""
OURS = {
    *("observed", "hooked", "share", "abandon", "found", "follow", "next_step", "begin", "average", "scales"),
    *("asks_for_batches", "takes_batch", "ends_step", "ends", "before_forward", "after_forward"),
    *("before_optimizer", "after_optimizer"),
    *("heal", "has_result", "finish", "in_background", "communicate_s", "reaches", "moved", "memory_is", "gone"),
    *("raise_in_vain", "why", "tell", "raise_if_over"),
}
"""Methods that only Covey calls."""


def described(module: str, name: str) -> Iterator[str]:
    if module == "covey":
        defined = getattr(covey, name)
        source, name_there = importlib.import_module(defined.__module__), defined.__name__
    else:
        source = None
        name_there = name
    file = Path(str(source.__file__)) if source else source_of(FOUND_IN.get(f"{module}.{name}", module))
    nodes = [node for node in ast.parse(file.read_text()).body if getattr(node, "name", "") == name_there]
    node = nodes[-1]  # an overloaded function's last one is its body
    assert isinstance(node, (ast.ClassDef, ast.FunctionDef))
    yield f"- `{name}{signature(node)}`: {first_sentence(node)}"
    if isinstance(node, ast.ClassDef):
        for inner in node.body:
            if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_") and inner.name not in OURS:
                if any(isinstance(each, ast.Attribute) and each.attr == "setter" for each in inner.decorator_list):
                    continue
                call = "" if is_property(inner) else signature(inner)
                yield f"    - `{inner.name}{call}`: {first_sentence(inner)}"


def source_of(module: str) -> Path:
    return ROOT / f"{module.replace('.', '/')}.py"


def is_property(node: ast.FunctionDef) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "property" for each in node.decorator_list)


def signature(node: ast.ClassDef | ast.FunctionDef) -> str:
    """Names and defaults of a function's arguments. Classes are not called by scripts, or take what their page says."""
    if isinstance(node, ast.ClassDef):
        return ""
    given = copy.deepcopy(node.args)
    for argument in ast.walk(given):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return f"({re.sub('^(self|cls)(, (/, )?)?', '', ast.unparse(given))})"


def first_sentence(node: ast.ClassDef | ast.FunctionDef) -> str:
    text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split()).partition(". ")[0]
    if len(text) > SENTENCE_MAX and text.find("; ", 40) > 0:
        text = text[: text.find("; ", 40)]
    return text.rstrip(".:")


# ---- exit codes ----


def exit_codes() -> Iterator[str]:
    yield from head("Exit codes", "")
    yield from ("## agentctl", "", "| code | meaning |", "|---:|---|")
    yield from (f"| {getattr(client, name)} | {text} |" for name, text in EXITS.items())
    yield from (
        "",
        "`agentctl wait` and `agentctl submit --wait` or `--follow` return the job's own code instead, or 128+N when "
        "signal N ended it.",
        "",
        "## agentd",
        "",
        "| code | meaning | what systemd does |",
        "|---:|---|---|",
        "| 0 | it was asked to end | nothing |",
        "| 1 | an error that a restart may clear | starts it again |",
        "| 2 | `agent.toml` is wrong, or the state directory cannot be used | leaves it down |",
        "| 3 | this host's identity or log cannot be trusted: a person decides | leaves it down |",
        "| 4 | this host's log contradicts its leader's where it is committed: a person decides | leaves it down |",
        "",
        "`journalctl -u covey -n 20` ends with what happened, why, and the next step.",
        "",
        "## A job's processes",
        "",
        "| code | meaning to Covey |",
        "|---:|---|",
        "| 0 | this rank is done |",
        "| 75 | queue the job again (at most 1,000 times) |",
        "| 70 | a successor could not get the state of the rank it replaces |",
        "| other | a failure; `--retries N` starts the job again so many times |",
        "",
    )


PAGES: Mapping[str, Callable[[], Iterator[str]]] = {
    "agentctl": agentctl,
    "http": http,
    "python": python,
    "exit-codes": exit_codes,
    "metrics": metrics,
}
"""Name of a page -> its lines."""


def text_of(name: str) -> str:
    return "\n".join(PAGES[name]()).rstrip() + "\n"


def write() -> None:
    for name in PAGES:
        (FOLDER / f"{name}.md").write_text(text_of(name))


def api(folder: Path) -> None:
    """Write a page for each module. What `covey` imports at its first use is imported now: pdoc looks at what is
    there."""
    vars(covey).update({name: getattr(covey, name) for name in covey.__all__})
    pdoc.pdoc(*MODULES, output_directory=folder)


def site(folder: Path) -> int:
    """Build the site; returns the exit code of mkdocs, which is 1 when a link or an anchor leads nowhere."""
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "--strict", "--site-dir", str(folder.resolve())]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    code = subprocess.run(command, cwd=ROOT, env=quiet, check=False).returncode
    if not code:
        api(folder / "api")
    return code


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(site(Path(sys.argv[1])))
    write()
