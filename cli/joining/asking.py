"""JoinAsking a member of a rack for what a new host needs, over UDP, before this host has an agent."""

import os
import socket
import time

from cli.client import FAILED, NO_AGENT, NOT_FOUND, REFUSED, TOO_LATE, USAGE, AgentctlError
from covey.ports.addresses import ip_port
from gossip.joining.messages import BY_KEY, PRIVATE_BYTES, JoinRefusal, JoinToken, RackGiven, Reason
from gossip.joining.policy import JoinAsking

ANSWER_S = 6.0
"""Seconds for which an answer is waited for."""
AGAIN_S = (0.3, 0.6, 1.2, 1.2, 1.2, 1.5)
"""Seconds after which the ask is sent again: datagrams get lost."""
ANSWER_BYTES_MAX = 2048

MORE = "on that host: agentctl rack token"
WHY: dict[Reason, tuple[str, str]] = {
    "wrong": ("its secret is not the one that was made there", "copy the whole line again, or " + MORE),
    "unknown": ("the agent there did not make it, or has restarted since: tokens are not kept on disk", MORE),
    "used": ("it was used: a token lets one host join", MORE),
    "expired": ("it has expired: a token is good for one hour", MORE),
    "version": ("the agent there is of another version", "install the same covey-agent on both: agentctl version"),
}
"""Why a token is refused, and what is next."""
OTHER_KEY = (
    "the gossip key of this host is not the one there",
    "join by a token instead: --token-file -, with what is printed on a member by agentctl rack token",
)


def checked_address(text: str) -> tuple[str, int]:
    """Host and port. AgentctlError for anything else."""
    try:
        host, port = ip_port(text)
    except OSError as error:
        host, port = "", 0
        why = str(error)
    else:
        why = "the port must not be 0"
    if not host or not port:
        raise AgentctlError(USAGE, f"{text!r} is not a host and a port", why, "agentctl rack join gpu1:7946 --token T")
    return host, port


def ask(at: str, token: JoinToken) -> RackGiven:
    """What the member at this address gives. AgentctlError when it refuses, or does not answer."""
    host, port = checked_address(at)
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        why = error.strerror or str(error)
        raise AgentctlError(NOT_FOUND, f"cannot find {host}", why, f"getent hosts {host}") from None
    asking = JoinAsking(token, os.urandom(PRIVATE_BYTES))
    with socket.socket(family, kind) as link:
        try:
            link.connect(address)
            return _answered(link, at, asking, token)
        except ConnectionRefusedError:
            why = "nothing listens on that UDP port"
            raise AgentctlError(NO_AGENT, f"no agent at {at}", why, "on that host: systemctl status covey") from None
        except OSError as error:
            why = error.strerror or str(error)
            raise AgentctlError(FAILED, f"cannot send to {at}", why, f"ping {host}") from None


def _answered(link: socket.socket, at: str, asking: JoinAsking, token: JoinToken) -> RackGiven:
    end_s, again = time.monotonic() + ANSWER_S, iter(AGAIN_S)
    strange = 0
    while (left_s := end_s - time.monotonic()) > 0:
        link.send(asking.datagram)
        until_s = time.monotonic() + min(left_s, next(again, left_s))
        while (left_s := until_s - time.monotonic()) > 0:
            link.settimeout(left_s)
            try:
                found = asking.answer(link.recv(ANSWER_BYTES_MAX))
            except TimeoutError:
                break
            if isinstance(found, RackGiven):
                return found
            if isinstance(found, JoinRefusal):
                raise _refused(at, token, found.reason)
            strange += 1
    if strange:
        why = "what answers there does not know the token"
        raise AgentctlError(REFUSED, f"{at} is not trusted", why, MORE)
    why = f"no answer within {ANSWER_S:g} s: a firewall may drop UDP on that port"
    raise AgentctlError(TOO_LATE, f"{at} does not answer", why, "on that host: systemctl status covey; agentctl doctor")


def _refused(at: str, token: JoinToken, reason: Reason) -> AgentctlError:
    if token.id == BY_KEY:
        return AgentctlError(REFUSED, f"{at} refused this host", *(OTHER_KEY if reason == "wrong" else WHY[reason]))
    return AgentctlError(REFUSED, f"{at} refused the token", *WHY[reason])
