"""Get a certificate, with which every host of the rack knows you over TCP: agentctl --agent https://HOST:PORT ...

Type it on a host of the rack: the kernel says who you are, and nobody else is asked. The private key is made here and
stays here; key and certificate are in login.pem of ~/.config/covey, which others cannot read, and the certificates of
the rack's authority in authority.pem beside it. Where your home directory is the same on another machine, nothing more
is needed there. For a machine that is no host of the rack, type there

    agentctl login --request - | ssh gpu1 agentctl login --sign - | agentctl login --take -

With the certificate you may do what you may on the host that you ask. It is good for some days; there is no way to call
it back before, but whoever is no member of the group of [http] on a host is refused there, and `agentctl keys rotate`
ends all certificates that were made before."""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from cli import tls
from cli.client import FAILED, REFUSED, Agent, AgentctlError, find, is_socket
from cli.context import Context
from cli.files import put

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

SIGNED_CHARACTERS_MAX = 1 << 20


class Signed(msgspec.Struct):
    """What `--sign` prints and `--take` reads (`agent.api.login.LoginView`)."""

    user: Annotated[str, msgspec.Meta(pattern=r"^\S{1,64}\Z")]
    uid: int
    until_wall_s: float
    certificate: str
    authority: str


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--days", type=int, default=1, metavar="N", help="how long it is good (default: 1, at most 30)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--request", metavar="FILE", help="only make a key; write a request for its certificate (-: stdout)"
    )
    how.add_argument("--sign", metavar="FILE", help="on a host: print a certificate for you by this request (-: stdin)")
    how.add_argument("--take", metavar="FILE", help="take what --sign printed as the certificate of the requested key")


def run(context: Context) -> int:
    args = context.args
    if args.request:
        return _request(args.request)
    if args.sign:
        print(msgspec.json.encode(_signed(context, _read(args.sign))).decode(), flush=True)
        return 0
    if args.take:
        return _take(context, _read(args.take))
    key, csr = _made()
    return _keep(context, key, _signed(context, csr))


def _request(file: str) -> int:
    """Make a key that waits for its certificate, and write the request."""
    key, csr = _made()
    _write(tls.folder() / tls.REQUESTED, key, 0o600)
    if file == "-":
        print(csr, end="", flush=True)
    else:
        _write(Path(file), csr, 0o644)
    return 0


def _take(context: Context, text: str) -> int:
    path = tls.folder() / tls.REQUESTED
    try:
        signed = msgspec.json.decode(text, type=Signed)
    except (msgspec.DecodeError, UnicodeError) as error:
        why = f"expected what agentctl login --sign prints: {error}"
        raise AgentctlError(FAILED, "this is no certificate", why, "agentctl login --help") from None
    try:
        key = path.read_text()
    except OSError as error:
        why = f"the key that was requested is not here: {path}: {error.strerror}"
        raise AgentctlError(FAILED, "this certificate was not taken", why, "agentctl login --request FILE") from None
    if not _belong(key, signed.certificate):
        why = f"it is not for the key in {path}"
        raise AgentctlError(REFUSED, "this certificate was not taken", why, "agentctl login --request FILE; sign that")
    status = _keep(context, key, signed)
    path.unlink(missing_ok=True)
    return status


def _signed(context: Context, csr: str) -> Signed:
    answer = _of_this_host(context).post("login", body={"csr": csr, "days": context.args.days})
    try:
        return msgspec.convert(answer.data, Signed)
    except msgspec.ValidationError as error:
        what = f"{answer.host} answered with no certificate"
        raise AgentctlError(FAILED, what, str(error), "compare versions: agentctl version") from None


def _of_this_host(context: Context) -> Agent:
    """An agent at a unix socket, whose kernel says who asks. Where COVEY_AGENT has agents of other machines alone, it
    is looked for as if that were unset."""
    found = context.agent
    if found.addresses and not any(map(is_socket, found.addresses)) and not context.args.agent:
        environ = {name: value for name, value in os.environ.items() if name != "COVEY_AGENT"}
        found = find(None, environ, found.timeout_s)
    sockets = [address for address in found.addresses if is_socket(address)]
    if context.agent.addresses and not sockets:
        why = "login needs the unix socket of a host, whose kernel says who you are"
        raise AgentctlError(REFUSED, "no certificate was made", why, tls.AGAIN)
    return Agent(sockets, found.found_by, found.timeout_s)


def _keep(context: Context, key: str, signed: Signed) -> int:
    """Write the files: whoever reads them meanwhile finds the earlier ones whole, or these."""
    _write(tls.folder() / tls.AUTHORITY, signed.authority, 0o644)
    path = tls.folder() / tls.LOGIN
    _write(path, tls.head(signed.user, signed.until_wall_s) + key + signed.certificate, 0o600)
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(signed.until_wall_s))
    if context.json:
        return context.say_json({"schema": 1, "data": _told(signed, path)})
    context.say(f"{signed.user} (uid {signed.uid}) until {when}: {path}")
    return 0


def _told(signed: Signed, path: Path) -> dict[str, Any]:
    return {"user": signed.user, "uid": signed.uid, "until_wall_s": signed.until_wall_s, "file": str(path)}


def _made() -> tuple[str, str]:
    """A new private key and a request for a certificate of it, PEM. The request says nothing of who asks."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding

    key = ec.generate_private_key(ec.SECP256R1())
    csr = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, SHA256())
    return _pem(key), csr.public_bytes(Encoding.PEM).decode()


def _pem(key: "EllipticCurvePrivateKey") -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def _belong(key: str, certificate: str) -> bool:
    """Whether the certificate is for this key."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        return x509.load_pem_x509_certificate(certificate.encode()).public_key() == (
            load_pem_private_key(key.encode(), None).public_key()
        )
    except (ValueError, TypeError):
        return False


def _read(file: str) -> str:
    try:
        if file == "-":
            return sys.stdin.read(SIGNED_CHARACTERS_MAX)
        with open(file, errors="replace") as found:
            return found.read(SIGNED_CHARACTERS_MAX)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise AgentctlError(FAILED, f"cannot read {file}", why, "name another file") from None


def _write(path: Path, text: str, mode: int) -> None:
    try:
        put(path, text, mode, folder_mode=0o700)
    except OSError as error:
        raise AgentctlError(
            FAILED, f"cannot write {path}", error.strerror or str(error), "free space, or rights"
        ) from None
