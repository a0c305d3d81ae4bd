"""Certificates of a rack: who is believed, who is not and why, and requests of any bytes."""

import ssl
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.authority.certificates import (
    CSR_CHARACTERS_MAX,
    CURVE,
    Named,
    NotBelieved,
    RackAuthority,
    authority_of,
    host_certificate,
    may_be_named,
    named_by,
    requested_key,
    user_certificate,
)
from agent.authority.service import CONTEXTS_MAX, HostAuthority
from agent.ports.clock import RealClock
from tests.families import examples

NOW_S = 1_800_000_000.0
RACK, OTHER = authority_of(b"k" * 32), authority_of(b"o" * 32)
KEY = ec.generate_private_key(CURVE)
ANN = Named("ann", 1001, NOW_S + 86_400)
SERIAL = bytes(range(16))
WRONG_UIDS = ("0", "-1", "01", "1 ", "x", "\u0663", "9" * 10)


def der(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.DER)


def of_ann(authority: RackAuthority = RACK, named: Named = ANN, now_s: float = NOW_S) -> bytes:
    return der(user_certificate(authority, KEY.public_key(), named, now_s, SERIAL))


def request(key: ec.EllipticCurvePrivateKey = KEY, name: str = "root") -> str:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name), x509.NameAttribute(NameOID.USER_ID, "0")])
    made = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, SHA256())
    return made.public_bytes(Encoding.PEM).decode()


def reason(found: Named | NotBelieved) -> str:
    assert isinstance(found, NotBelieved) and found.why
    return found.reason


# ---- the authority ---------------------------------------------------------------------------------------------------


def test_hosts_with_one_key_have_one_authority_and_others_another() -> None:
    again = authority_of(b"k" * 32)
    assert again.certificate.subject == RACK.certificate.subject != OTHER.certificate.subject
    assert named_by(of_ann(again), [RACK], NOW_S) == named_by(of_ann(), [again], NOW_S) == ANN
    assert again.key.private_numbers() == RACK.key.private_numbers() != OTHER.key.private_numbers()
    for bits in range(0, 256, 64):  # any two keys
        key = (1 << bits).to_bytes(32, "big")
        assert authority_of(key).certificate.subject not in (RACK.certificate.subject, OTHER.certificate.subject)


def test_an_authority_signs_hosts_and_users_and_no_authorities() -> None:
    basic = RACK.certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert basic.ca and basic.path_length == 0
    ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=RACK.pem + OTHER.pem)


class SetClock(RealClock):
    at_s = NOW_S

    def wall_s(self) -> float:
        return self.at_s


def test_the_tls_of_a_host_is_made_anew_when_names_or_keys_change_and_each_day() -> None:
    keys, clock = [b"k" * 32], SetClock()
    rack = HostAuthority(lambda: keys, clock)

    def now(*names: str, address: str = "10.0.0.1") -> ssl.SSLContext:
        return rack.context(("gpu1", *names), address)

    first = now()
    assert now() is first is now(address="::ffff:10.0.0.1") and now(address="10.0.0.2") is not first
    clock.at_s += 86_399
    assert now() is first
    clock.at_s += 1
    second = now()
    assert second is not first, "long before its certificate is out of date"
    clock.at_s -= 10 * 86_400
    third = now()
    assert third is not second, "the clock was set back: its certificate may not be good yet"
    named = now("gpu1.example.org")
    assert named is not third
    keys[:] = [b"n" * 32, b"k" * 32]
    assert now("gpu1.example.org") is not named and rack.pem.count("BEGIN CERTIFICATE") == 2
    for last in range(40):
        now(address=f"10.0.1.{last}")
    assert len(rack._made) <= CONTEXTS_MAX


# ---- who is believed -------------------------------------------------------------------------------------------------


def test_a_certificate_names_the_user_for_whom_it_was_made_until_it_is_out_of_date() -> None:
    for at_s in (NOW_S, NOW_S - 599, ANN.until_s - 1):
        assert named_by(of_ann(), [RACK], at_s) == ANN
    for at_s in (ANN.until_s, ANN.until_s + 1, NOW_S - 601, 0.0):
        assert reason(named_by(of_ann(), [RACK], at_s)) == "certificate_out_of_date"


def test_a_certificate_of_another_rack_or_of_a_key_that_was_removed_names_nobody() -> None:
    assert reason(named_by(of_ann(OTHER), [RACK], NOW_S)) == "certificate_of_others"
    assert reason(named_by(of_ann(), [], NOW_S)) == "certificate_of_others"
    for trusted in ([RACK, OTHER], [OTHER, RACK]):  # while keys are rotated
        assert named_by(of_ann(), trusted, NOW_S) == named_by(of_ann(OTHER), trusted, NOW_S) == ANN


def test_who_signs_as_an_authority_of_the_same_name_is_another_one() -> None:
    key = ec.generate_private_key(CURVE)
    thief = RackAuthority(key, RACK.certificate)
    assert reason(named_by(of_ann(thief), [RACK], NOW_S)) == "certificate_of_others"
    anns = x509.load_der_x509_certificate(of_ann())
    thief = RackAuthority(KEY, anns)  # ann signs for root with her own
    assert reason(named_by(der(user_certificate(thief, key.public_key(), ANN, NOW_S, SERIAL)), [RACK], NOW_S)) == (
        "certificate_of_others"
    )


def test_the_certificate_of_a_host_or_of_the_authority_is_no_users() -> None:
    host = host_certificate(RACK, KEY.public_key(), ["ann", "10.0.0.1", "gpu1.example.org"], NOW_S, 60.0, SERIAL)
    assert reason(named_by(der(host), [RACK], NOW_S)) == "certificate"
    assert isinstance(named_by(der(RACK.certificate), [RACK], NOW_S), NotBelieved)
    for usages in (
        [ExtendedKeyUsageOID.SERVER_AUTH],
        [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH],
    ):
        since = datetime.fromtimestamp(NOW_S, UTC)
        user = x509.load_der_x509_certificate(of_ann()).subject
        builder = x509.CertificateBuilder().subject_name(user).issuer_name(RACK.certificate.subject).serial_number(5)
        builder = (
            builder.public_key(KEY.public_key()).not_valid_before(since).not_valid_after(since + timedelta(days=1))
        )
        made = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=True).sign(RACK.key, SHA256())
        assert reason(named_by(der(made), [RACK], NOW_S)) == "certificate", "though it has ann's name and number"
    names = host.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["ann", "gpu1.example.org"]


@pytest.mark.parametrize(
    "attributes",
    [
        [(NameOID.COMMON_NAME, "ann")],
        [(NameOID.USER_ID, "1001")],
        [(NameOID.COMMON_NAME, "ann"), (NameOID.COMMON_NAME, "root"), (NameOID.USER_ID, "1001")],
        [(NameOID.COMMON_NAME, "ann"), (NameOID.USER_ID, "1001"), (NameOID.USER_ID, "0")],
        *(
            [(NameOID.COMMON_NAME, "ann"), (NameOID.USER_ID, uid)]
            for uid in ("0", "-1", "01", "1 ", "x", "٣", "9" * 10)
        ),
        *([(NameOID.COMMON_NAME, name), (NameOID.USER_ID, "1001")] for name in ("an n", "ann\n", "-rf", "@wheel")),
    ],
)
def test_what_names_no_user_or_more_than_one_names_nobody(attributes: list[tuple[x509.ObjectIdentifier, str]]) -> None:
    """Signed by the authority all the same."""
    since = datetime.fromtimestamp(NOW_S, UTC)
    builder = x509.CertificateBuilder().subject_name(x509.Name([x509.NameAttribute(*each) for each in attributes]))
    builder = builder.issuer_name(RACK.certificate.subject).public_key(KEY.public_key()).serial_number(5)
    builder = builder.not_valid_before(since).not_valid_after(since + timedelta(days=1))
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
    made = builder.add_extension(usage, critical=True).sign(RACK.key, SHA256())
    assert reason(named_by(der(made), [RACK], NOW_S)) == "certificate"
    bare = builder.sign(RACK.key, SHA256())
    assert reason(named_by(der(bare), [RACK], NOW_S)) == "certificate"


@pytest.mark.filterwarnings("ignore::cryptography.utils.CryptographyDeprecationWarning")
@settings(max_examples=examples(150), deadline=None)
@given(st.binary(max_size=60) | st.just(of_ann()), st.integers(0, 1 << 40), st.binary(min_size=1, max_size=4))
def test_of_any_bytes_somebody_is_named_or_nobody_is(data: bytes, at: int, put: bytes) -> None:
    place = at % max(1, len(data))
    changed = data[:place] + put + data[place + len(put) :]
    found = named_by(changed, [RACK], NOW_S)
    assert isinstance(found, NotBelieved) or changed == data or found == ANN, "the signature holds for one user alone"


# ---- requests --------------------------------------------------------------------------------------------------------


def test_of_a_request_its_key_counts_and_nothing_that_it_says() -> None:
    key = requested_key(request(name="root"))
    assert key == KEY.public_key()
    assert key is not None
    assert named_by(der(user_certificate(RACK, key, ANN, NOW_S, SERIAL)), [RACK], NOW_S) == ANN


def test_a_request_of_another_key_or_that_its_key_did_not_sign_is_none() -> None:
    other = ec.generate_private_key(ec.SECP384R1())
    assert requested_key(request(other)) is None
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    for signed in (
        builder.sign(ed25519.Ed25519PrivateKey.generate(), None),
        builder.sign(rsa.generate_private_key(65537, 1024), SHA256()),
    ):
        assert requested_key(signed.public_bytes(Encoding.PEM).decode()) is None
    good = builder.sign(KEY, SHA256()).public_bytes(Encoding.DER)
    forged = x509.load_der_x509_csr(good[:-1] + bytes((good[-1] ^ 1,))).public_bytes(Encoding.PEM).decode()
    assert requested_key(forged) is None, "else whoever knows a public key gets a certificate for it"
    assert requested_key(" " * CSR_CHARACTERS_MAX + request()) is None


@settings(max_examples=examples(200), deadline=None)
@given(st.text(max_size=80) | st.just(request()), st.integers(0, 1 << 40), st.text(max_size=6))
def test_of_any_text_a_key_is_asked_for_or_none_is(text: str, at: int, put: str) -> None:
    place = at % max(1, len(text))
    found = requested_key(text[:place] + put + text[place + len(put) :])
    assert found is None or found == KEY.public_key()


@pytest.mark.parametrize(
    ("user", "uid", "may"),
    [("ann", 1001, True), ("DOM\\ann", 1 << 31, True), ("a" * 64, 1, True), ("a" * 65, 1, False), ("", 5, False),
     ("root", 0, False), ("ann", -1, False), ("ann", (1 << 32) - 1, False), ("a b", 5, False)],
)  # fmt: skip
def test_root_and_whoever_has_no_name_cannot_be_named(user: str, uid: int, may: bool) -> None:
    assert may_be_named(user, uid) == may
