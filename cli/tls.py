"""What `agentctl login` leaves in the user's config folder, and TLS with it.

login.pem       private key and certificate of the user, mode 0600; its first line says until when it is good
authority.pem   certificates of the rack's authorities: who shows a certificate signed by one of them is a host
login.key       the key of a request whose certificate has not come yet (`login --request`)
"""

import os
import re
import ssl
import stat
import time
from pathlib import Path
from typing import NamedTuple

SCHEME = "https://"
LOGIN, AUTHORITY, REQUESTED = "login.pem", "authority.pem", "login.key"
AGAIN = "on a host of the rack: agentctl login"
_UNTIL = re.compile(r"# of (\S+) until ([0-9]{1,12}) ")
_NOT_THE_NAME = (62, 64)
"""X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH of OpenSSL (x509_vfy.h)."""
_NOT_NOW = (9, 10)
"""X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED."""


class Words(NamedTuple):
    """An error in the three lines of AgentctlError."""

    what: str
    why: str
    next: str


class NotLoggedIn(Exception):
    """This user has no certificate that can be used."""

    def __init__(self, words: Words) -> None:
        super().__init__(words.what)
        self.words = words


def folder() -> Path:
    """The user's config folder for Covey."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")) / "covey"


def head(user: str, until_wall_s: float) -> str:
    """The first line of `login.pem`."""
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(until_wall_s))
    return f"# of {user} until {int(until_wall_s)} ({when})\n"


def is_over(path: Path) -> str:
    """Since when the certificate of this file is out of date, in words; empty: it is not, or that is not known."""
    try:
        with path.open(errors="replace") as file:
            found = _UNTIL.match(file.readline(200))
    except OSError:
        return ""
    if found is None or time.time() < int(found[2]):
        return ""
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(int(found[2])))
    return f"the certificate of {found[1]} in {path} is out of date since {when}"


def context(address: str) -> ssl.SSLContext:
    """TLS to an agent, with the user's certificate. NotLoggedIn."""
    path, authority = folder() / LOGIN, folder() / AUTHORITY
    what = f"cannot ask {address}"
    try:
        found = os.stat(path)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            why = f"{path} has a private key, and is another user's or can be read by others"
            raise NotLoggedIn(Words(what, why, f"rm {path}, then {AGAIN}"))
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        made.minimum_version = ssl.TLSVersion.TLSv1_3
        made.load_verify_locations(authority)
        made.load_cert_chain(path)
    except FileNotFoundError as error:
        why = f"you have no certificate of a rack: there is no {error.filename or path}"
        raise NotLoggedIn(Words(what, why, AGAIN)) from None
    except (OSError, ValueError) as error:  # SSLError is one
        raise NotLoggedIn(Words(what, f"{path} or {authority} cannot be used: {error}", AGAIN)) from None
    if over := is_over(path):
        raise NotLoggedIn(Words(what, over, AGAIN))
    return made


def not_believed(address: str, error: ssl.SSLError) -> Words:
    """Why TLS with an agent did not begin."""
    what = f"{address} is not an agent of your rack"
    if not isinstance(error, ssl.SSLCertVerificationError):
        return Words(what, f"it does not speak TLS 1.3: {error.reason or error}", "check the address: agentctl hosts")
    if error.verify_code in _NOT_THE_NAME:
        why = f"its certificate has other names: {error.verify_message}"
        return Words(what, why, "use its host name or IP address, or add the name to [http] names of its agent.toml")
    if error.verify_code in _NOT_NOW:
        return Words(what, f"by this clock its certificate is not good: {error.verify_message}", "compare clocks: date")
    why = "another rack's authority signed its certificate, or one since your login (agentctl keys rotate)"
    return Words(what, why, AGAIN)


def refused(address: str, error: Exception) -> Words | None:
    """Why an agent ended TLS after it saw the user's certificate; None: that was not why, as far as can be seen."""
    if not address.startswith(SCHEME):
        return None
    reason = (getattr(error, "reason", "") or "") if isinstance(error, ssl.SSLError) else ""
    over = is_over(folder() / LOGIN)
    if not over and "ALERT" not in reason:
        return None
    if not over and "EXPIRED" in reason:
        over = "by that host's clock it is out of date"
    elif not over and "BAD_CERTIFICATE" in reason:
        over = "by that host's clock it is not good yet, or it is no user's: compare clocks (date)"
    why = over or f"it is of another rack, or of an authority before a rotation of keys ({reason.lower()})"
    return Words(f"{address} does not believe your certificate", why, AGAIN)
