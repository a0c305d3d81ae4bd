"""sacctmgr: which user may submit for which account, and what each account may use. It shows, and changes nothing.

Accounts are Covey's tenants. A rack without users in its table of tenants has no associations to show."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cli.client import USAGE, AgentctlError
from cli.context import Context
from cli.slurm.options import read
from cli.table import printable

EXAMPLE = "sacctmgr show user ann format=Account"
SHOWS = ("list", "show")
ENTITIES = {
    "user": ("User", "Account"),
    "account": ("Account", "GrpTRES"),
    "association": ("Cluster", "Account", "User", "GrpTRES"),
}
"""What is shown -> the fields without `format=`."""
FIELDS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "account": lambda row: row["account"],
    "defaultaccount": lambda row: row["account"],
    "user": lambda row: row["user"],
    "cluster": lambda row: "covey",
    "partition": lambda row: "",
    "grptres": lambda row: "" if row["gpus"] is None else f"gres/gpu={row['gpus']}",
}
"""Fields in lower case -> what they show of a user in an account."""


def sacctmgr(context: Context, words: Sequence[str]) -> int:
    flags = {"noheader": "n", "parsable2": "P", "parsable": "p", "associations": "s", "withassoc": "", "readonly": "r"}
    said = read("sacctmgr", words, {"format": "o"}, flags)
    verb, *rest = said.words or [""]
    if verb.lower() not in SHOWS:
        why = "what users and accounts may do is changed by operators: agentctl tenant, agentctl quota"
        raise AgentctlError(USAGE, f"sacctmgr has no {verb[:40] or 'command'} here", why, EXAMPLE)
    entity = _entity(rest[0] if rest else "")
    chosen, form = _conditions(rest[1:], "account" if entity == "account" else "user")
    names = [name for name in (said.values.get("format") or form).split(",") if name] or list(ENTITIES[entity])
    fields = [name.partition("%")[0] for name in names]
    for name in fields:
        if name.lower() not in FIELDS:
            why = f"expected some of {', '.join(FIELDS)}"
            raise AgentctlError(USAGE, f"invalid field {name[:40]}", why, EXAMPLE)
    rows = [] if "noheader" in said.values else [tuple(fields)]
    tenants = context.agent.get("tenants").data
    found = [row for row in _associations(tenants, entity) if all(row[key] in values for key, values in chosen.items())]
    rows += dict.fromkeys(tuple(str(FIELDS[name.lower()](row)) for name in fields) for row in found)
    wide = not {"parsable", "parsable2"} & said.values.keys()
    for row in rows:
        cells = [f"{printable(cell):>10}" if wide else printable(cell) for cell in row]
        context.say((" " if wide else "|").join(cells) + ("|" if "parsable" in said.values else ""))
    return 0


def _entity(word: str) -> str:
    found = [name for name in ENTITIES if len(word) > 2 and f"{name}s".startswith(word.lower())]
    if not found:
        why = f"expected one of {', '.join(ENTITIES)}"
        raise AgentctlError(USAGE, f"sacctmgr shows no {word[:40] or 'thing without a name'!r} here", why, EXAMPLE)
    return found[0]


def _conditions(words: Sequence[str], of: str) -> tuple[dict[str, list[str]], str]:
    """What the rows are chosen by, and the fields that are asked for. A word alone names what is listed."""
    chosen: dict[str, list[str]] = {}
    form = ""
    for word in words:
        name, equals, value = word.partition("=")
        name = name.lower().rstrip("s")
        if word.lower() == "where" or word.lower() in ("withassoc", "tree"):
            continue
        if name == "format" and equals:
            form = value
        elif name in ("user", "account", "name") and equals:
            chosen[of if name == "name" else name] = value.split(",")
        elif name == "cluster" and equals:
            if value != "covey":
                raise AgentctlError(USAGE, f"there is no cluster {value[:40]}", "this rack is called covey", EXAMPLE)
        elif not equals:
            chosen[of] = word.split(",")
        else:
            why = "expected user=, account= or format="
            raise AgentctlError(USAGE, f"unknown condition {word[:60]}", why, EXAMPLE)
    return chosen, form


def _associations(tenants: Sequence[Mapping[str, Any]], entity: str) -> Iterator[dict[str, Any]]:
    for tenant in tenants:
        for user in [""] if entity == "account" else tenant["users"]:
            yield {"account": tenant["tenant"], "user": user, "gpus": tenant["gpus"]}
