"""Print the address of the agent's page; with --open, open it in this machine's browser.

Without TLS an agent shows its page to its own host alone, to whoever is logged in there: from elsewhere, forward the
port with ssh. Where other machines reach the address, a browser needs the certificate of `agentctl login`."""

import argparse
from collections.abc import Mapping
from typing import Any

from cli.client import NOT_FOUND, AgentctlError
from cli.context import Context

LOOPBACK = ("127.", "[::1]", "localhost")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--open", action="store_true", help="open it in a browser")


def run(context: Context) -> int:
    status = context.agent.get("status")
    url, words = found(status.data, status.host)
    if context.json:
        context.say_json({"schema": 1, "data": {"url": url, "how": words}})
    else:
        context.say(url)
        context.say(words)
    if context.args.open:
        import webbrowser  # only where it is needed: agentctl's imports are a budget

        if not webbrowser.open(url):
            raise AgentctlError(
                NOT_FOUND, "no browser was opened", "this machine has none that is known", f"open {url}"
            )
    return 0


def found(status: Mapping[str, Any], host: str) -> tuple[str, str]:
    """The address of an agent's page, and who may read it. AgentctlError where it has none."""
    http = status.get("http") or {}
    bind = str(http.get("bind") or "")
    if not bind:
        why = f"{host} listens at no TCP address: `bind` of [http] in its agent.toml is empty"
        raise AgentctlError(NOT_FOUND, f"{host} has no page", why, 'set bind = "127.0.0.1:8470" there, and restart it')
    port = bind.rpartition(":")[2]
    if not bind.startswith(LOOPBACK):
        return f"https://{host}:{port}/", f"for browsers with a certificate of this rack: agentctl login, on {host}"
    sees = "sees all" if http.get("read_open") else "sees what everybody may"
    elsewhere = f"from another machine: ssh -L {port}:127.0.0.1:{port} {host}"
    return f"http://{bind}/", f"for whoever is logged in to {host}, who {sees}, without a password; {elsewhere}"
