"""What people ask is checked once and well; what comes off a wire or a log is bounded, whatever it is."""

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agent.raft.messages import COMMAND_BYTES_MAX
from agent.rpc.envelope import ENVELOPE_BYTES_MAX
from covey.core.carried import ARGV_BYTES_MAX, ENV_BYTES_MAX, VARIABLES_MAX
from covey.core.ids import HostId, JobId
from plugins.facts import Place
from plugins.scheduler.messages import commands, wire
from plugins.scheduler.messages.commands import Submitted
from plugins.scheduler.messages.options import OPTIONS
from plugins.scheduler.messages.output_names import written_out
from plugins.scheduler.messages.spec import JobOwner, JobSpec, SealedEnv, SpecError, name_of
from plugins.scheduler.messages.wire import SEALED_BYTES_MAX

GOOD: dict[str, Any] = {
    "name": "digits",
    "tenant": "alice",
    "class": "auto",
    "workers": 4,
    "workers_max": 0,
    "share_host": "",
    "gpus_per_worker": 2,
    "argv": ["python", "digits.py"],
    "cwd": "/coordinator/alice",
    "env": {"PATH": "/bin"},
    "skew": 0.5,
    "time_limit_s": 60,
    "signal_before_s": 20,
    "stop_signal": "USR1",
    "grace_s": 5,
    "hang_s": 600,
    "spares": 0,
    "pack": "host",
    "on_lost": "keep",
    "retries": 3,
    "retries_lost": 2,
    "retries_again": 7,
    "retries_preempted": 9,
    "gpu_memory": 8 << 30,
    "remote_memory": 16 << 30,
    "host_memory": 24 << 30,
    "cpus": 6,
    "private_tmp": True,
    "image": "nvcr.io/nvidia/pytorch:24.05-py3",
    "bind_gpus": True,
    "hooks": False,
    "stdout": "/out/%j.%r",
    "stderr": "",
    "array": "0-9:3%2",
    "after": ["ok:j3", "any:j5"],
    "begin_wall_s": 5.0,
    "hold": True,
}


EXPECTED = {option.field: option.expected for option in OPTIONS}


def test_a_full_job_is_taken_as_given() -> None:
    spec = JobSpec.parse(GOOD)
    assert EXPECTED.keys() == GOOD.keys()
    assert msgspec.to_builtins(spec) == {
        **GOOD,
        "argv": ("python", "digits.py"),
        "after": ("ok:j3", "any:j5"),
        "time_limit_s": 60.0,
        "signal_before_s": 20.0,
        "grace_s": 5.0,
        "hang_s": 600.0,
        "owner": None,
        "title": "",
    }
    assert (spec.gpus, spec.width) == (8, 8)


def test_no_submission_says_whose_job_it_is() -> None:
    for owner in ({"user": "root", "uid": 0}, None, "root"):
        with pytest.raises(SpecError, match="'owner' is not a field of a job"):
            JobSpec.parse({**GOOD, "owner": owner})


def test_only_a_command_is_needed_and_the_name_comes_from_it() -> None:
    spec = JobSpec.parse({"argv": ["/usr/bin/python3", "examples/Digits_2.py", "--fast"], "time_limit_s": None})
    assert (spec.name, spec.workers, spec.gpus_per_worker, spec.job_class) == ("digits-2", 1, 1, "guaranteed")
    assert (spec.title, spec.called) == ("Digits_2", "Digits_2") and name_of(["/opt/__"]) == "job"
    named = JobSpec.parse({"argv": ["x"], "name": "BERT_large+v2"})
    assert (named.name, named.title, named.called) == ("bert-large-v2", "BERT_large+v2", "BERT_large+v2")
    assert JobSpec.parse({"argv": ["x"], "name": "__"}).name == "job"


def test_words_in_names_of_output_are_known_or_refused() -> None:
    for name, said in (("/o/%q", "has %q"), ("/o/%", "has %"), ("/o/%4j", "has %4")):
        with pytest.raises(SpecError) as caught:
            JobSpec.parse({"argv": ["x"], "stdout": name})
        assert caught.value.field == "stdout" and said in caught.value.what and "%j (the job's id" in caught.value.why
    values = {"j": "j12", "r": "3", "x": "../a", "a": "", "i": "12", "A": "12", "N": "h1", "u": "ann"}
    assert written_out("/o/%x/%j-%i.%r%%%a", values) == "/o/.._a/j12-12.3%_"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "Ümlaut"), ("name", ""), ("name", "a" * 64), ("tenant", "../etc"), ("tenant", 3), ("class", "best"),
        ("workers", 0), ("workers", 4097), ("workers", "4"), ("workers", True), ("workers", 1.5),
        ("gpus_per_worker", -1), ("gpus_per_worker", 65), ("argv", []), ("argv", "train"),
        ("cwd", "here"), ("cwd", "/\0"), ("cwd", "/\ud800"), ("argv", None),
        ("env", ["A"]), ("skew", -0.1), ("skew", 1.1), ("skew", float("nan")),
        ("time_limit_s", 0), ("time_limit_s", float("nan")), ("time_limit_s", float("inf")), ("grace_s", -1),
        ("signal_before_s", -1), ("signal_before_s", "soon"), ("signal_before_s", 86_401),
        ("grace_s", float("nan")), ("hang_s", 0), ("hang_s", float("nan")),
        ("grace_s", 10**9), ("bind_gpus", 1), ("remote_memory", -1), ("remote_memory", "8GiB"), ("pack", "all"),
    ],
)  # fmt: skip
def test_every_error_names_the_field_what_was_found_and_what_was_expected(field: str, value: Any) -> None:
    with pytest.raises(SpecError) as caught:
        JobSpec.parse({**GOOD, field: value})
    assert caught.value.field == field
    if value is None:
        return
    assert caught.value.what.startswith(f"invalid {field}: ") and len(caught.value.what) < 120
    assert caught.value.why == f"expected {EXPECTED[field]}"


def test_a_warning_comes_before_a_limit_that_there_is() -> None:
    limits: tuple[dict[str, int], ...] = ({}, {"time_limit_s": 30})
    for fields, why in zip(limits, ("it has no time limit", "its time limit is 30 s"), strict=True):
        with pytest.raises(SpecError, match="cannot be warned 30 s before its limit") as caught:
            JobSpec.parse({"argv": ["x"], "signal_before_s": 30, **fields})
        assert (caught.value.field, caught.value.why) == ("signal_before_s", why)
    assert JobSpec.parse({"argv": ["x"], "signal_before_s": 30, "time_limit_s": 31}).runs_for_s == 1.0


IMAGES = (
    *("torch:2", "localhost/torch", "nvcr.io/nvidia/pytorch:24.05-py3", "registry:5000/a_b/c-d:T.1", "7982b55cd470"),
    *("a@sha256:" + "0" * 64, "/images/torch 2.sif", "/images/rootfs", "torch.sif"),
)
NO_IMAGES = (
    *("--privileged", "-v", "docker://torch", "docker-archive:/torch.tar", "dir:/torch", "Torch", "torch:", "a b"),
    *("torch:2\n", "../torch", "torch:2 --privileged", "a@sha256:00", "/", "a" * 5000, 7, ["torch"]),
)


def test_an_image_is_a_name_or_a_path_and_nothing_that_podman_fetches() -> None:
    base = {"argv": ["train.py"], "cwd": "/home/ann"}
    for image in IMAGES:
        assert JobSpec.parse({**base, "image": image}).image == image
    for other in NO_IMAGES:
        with pytest.raises(SpecError, match="invalid image"):
            JobSpec.parse({**base, "image": other})
    assert JobSpec.parse({**base, "image": None, "spares": 1}).image == JobSpec.parse({**base, "image": ""}).image == ""


def test_what_does_not_go_with_an_image_is_refused_in_words() -> None:
    given = {"argv": ["train.py"], "cwd": "/home/ann", "image": "torch:2"}
    with pytest.raises(SpecError, match="this job cannot have spares in image torch:2"):
        JobSpec.parse({**given, "spares": 1})
    for cwd in ("/", "/usr", "/usr/", "//", "/home/..", "/var"):
        with pytest.raises(SpecError, match="a job in an image cannot run in"):
            JobSpec.parse({**given, "cwd": cwd})
    assert JobSpec.parse({**given, "cwd": "/var/lib/ann"}).cwd == "/var/lib/ann"


ELASTIC: dict[str, Any] = {"argv": ["train.py"], "workers": 4, "workers_max": 16}


def test_a_range_of_workers_has_the_higher_number_of_ranks_and_counts_as_the_lower() -> None:
    spec = JobSpec.parse({**ELASTIC, "gpus_per_worker": 2, "pack": "any", "class": "auto"})
    assert (spec.elastic, spec.world_size, spec.workers, spec.gpus, spec.width) == (True, 16, 4, 8, 8)


@pytest.mark.parametrize("most", [0, 4])
def test_a_range_of_one_number_is_the_same_job_as_that_number(most: int) -> None:
    plain = JobSpec.parse({"argv": ["train.py"], "workers": 4})
    spec = JobSpec.parse({**ELASTIC, "workers_max": most})
    assert (spec.elastic, spec.world_size) == (False, 4)
    assert msgspec.msgpack.encode(spec) == msgspec.msgpack.encode(plain)


@pytest.mark.parametrize(
    ("field", "given", "what", "why"),
    [
        (
            "workers_max",
            {"workers": 16, "workers_max": 4},
            "invalid range of workers: 16..4",
            "first number is the few",
        ),
        ("on_lost", {"on_lost": "restart"}, "this job cannot have 4..16 workers", "on_lost = 'restart'"),
        ("on_lost", {"on_lost": "keep"}, "this job cannot have 4..16 workers", "on_lost = 'keep'"),
        ("pack", {"pack": "apart"}, "this job cannot have 4..16 workers", "pack = 'apart' fixes the hosts"),
        ("pack", {"pack": "host"}, "this job cannot have 4..16 workers", "pack = 'host' fixes the hosts"),
        ("spares", {"spares": 1}, "this job cannot have 4..16 workers", "carry the ranks of a lost one at once"),
    ],
)
def test_what_does_not_go_with_a_range_is_refused_in_words(
    field: str, given: dict[str, Any], what: str, why: str
) -> None:
    with pytest.raises(SpecError) as caught:
        JobSpec.parse({**ELASTIC, **given})
    assert (caught.value.field, caught.value.what) == (field, what)
    assert why in caught.value.why and caught.value.next


def test_a_job_without_gpus_may_share_hosts_in_turns() -> None:
    for group in ("auto", "night", ""):
        assert JobSpec.parse({"argv": ["a"], "gpus_per_worker": 0, "share_host": group}).share_host == group


def test_a_job_with_gpus_takes_no_turns_and_is_told_what_to_set() -> None:
    for gpus in ({}, {"gpus_per_worker": 2}):
        with pytest.raises(SpecError) as caught:
            JobSpec.parse({"argv": ["a"], "share_host": "auto", **gpus})
        assert caught.value.field == "share_host" and "not given in turns" in caught.value.why
        assert "--gpus 0" in caught.value.next


@pytest.mark.parametrize("group", ["Auto", "a b", "-x", "x" * 64, 1, ["auto"]])
def test_a_group_that_is_no_name_is_refused(group: Any) -> None:
    with pytest.raises(SpecError) as caught:
        JobSpec.parse({"argv": ["a"], "gpus_per_worker": 0, "share_host": group})
    assert caught.value.why == f"expected {EXPECTED['share_host']}"


def test_a_misspelt_field_is_answered_with_the_nearest_one() -> None:
    for wrong, right in (("gpu_per_worker", "gpus_per_worker"), ("tennant", "tenant"), ("Workers", "workers")):
        with pytest.raises(SpecError) as caught:
            JobSpec.parse({**GOOD, wrong: 1})
        assert caught.value.next == f"did you mean {right}?"
    with pytest.raises(SpecError) as caught:
        JobSpec.parse({**GOOD, "zzzzzz": 1})
    assert caught.value.next.startswith("use one of after, argv, array, begin_wall_s, bind_gpus, class, cpus")


@pytest.mark.parametrize(
    ("field", "value", "what", "why"),
    [
        ("argv", ["python", "a\0b"], "invalid argument 1: 'a\\x00b'", "NUL"),
        ("argv", ["\ud800"], "invalid argument 0: ", "half of a pair of UTF-16"),
        ("argv", ["x"] * 4097, "the command has 4,097 arguments", "the limit is 4,096"),
        ("argv", ["a", "x" * 131_072], "argument 1 of the command has 131,072 bytes (128 KiB)", "131,071 bytes"),
        ("argv", ["x" * 100_000] * 2, "the arguments have 200,000 bytes", "the limit is 196,608 bytes (192 KiB)"),
        ("env", {"A=B": "1"}, "invalid name of a variable: 'A=B'", "without '='"),
        ("env", {"": "1"}, "invalid name of a variable: ''", "at least one character"),
        ("env", {"A": 1}, "variable 'A' cannot be passed on", "this is a int"),
        ("env", {"A": "\0"}, "variable A cannot be passed on", "NUL"),
        ("env", {"N" * 257: ""}, "NNN'... has 257 characters", "the limit is 256"),
        ("env", {"BIG": "x" * 131_068}, "variable BIG has 131,072 bytes", "131,071 bytes (128.0 KiB)"),
        ("env", {f"V{n}": "" for n in range(8193)}, "the environment has 8,193 variables", "the limit is 8,192"),
        (
            "env",
            {"B": "x" * 90_000} | {f"V{n}": "x" * 50_000 for n in range(9)},
            "the environment has 540,029 bytes (527.4 KiB)",
            "the largest variables are B (90,002 bytes (87.9 KiB)), V0 (50,003 bytes",
        ),
    ],
)
def test_what_a_process_cannot_be_given_is_named_with_its_size(field: str, value: Any, what: str, why: str) -> None:
    with pytest.raises(SpecError) as caught:
        JobSpec.parse({**GOOD, field: value})
    assert caught.value.field == field
    assert what in caught.value.what and why in caught.value.why, (caught.value.what, caught.value.why)
    assert len(caught.value.what) < 160 and len(caught.value.why) < 240 and caught.value.next


def test_the_limits_of_every_field_stand_in_the_words_that_refuse_it() -> None:
    """Whoever is told `expected ...` and obeys is not refused again."""
    for field in msgspec.structs.fields(JobSpec):
        meta = [found for found in _metas(field.type) if isinstance(found, msgspec.Meta)]
        for bound in (number for found in meta for number in (found.ge, found.gt, found.le) if number is not None):
            assert f"{bound:.0f}" in EXPECTED[field.encode_name], (field.encode_name, bound)


def _metas(annotated: Any) -> list[Any]:
    return [*getattr(annotated, "__metadata__", ()), *(m for part in get_args(annotated) for m in _metas(part))]


def test_the_longest_job_fits_into_one_change_of_the_log_and_one_message() -> None:
    argv = ["x" * 48 for _ in range(4096)]
    assert sum(map(len, argv)) == ARGV_BYTES_MAX
    spec = JobSpec.parse({**GOOD, "argv": argv, "cwd": "/" + "x" * 4095})
    submitted = Submitted(
        wall_s=0.0, key="k" * 64, spec=spec, env=SealedEnv("0" * 32, bytes(32), (HostId("h" * 63),) * 16)
    )
    assert len(msgspec.msgpack.encode(submitted)) < COMMAND_BYTES_MAX
    with pytest.raises(SpecError):
        JobSpec.parse({**GOOD, "argv": [*argv[:-1], "x" * 49]})
    env = {f"{n:04}": "x" * 59 for n in range(VARIABLES_MAX)}
    assert sum(len(name) + 1 + len(value) for name, value in env.items()) == ENV_BYTES_MAX
    sealed = len(msgspec.msgpack.encode(JobSpec.parse({**GOOD, "env": env}).env)) + 16
    assert sealed < SEALED_BYTES_MAX < ENVELOPE_BYTES_MAX - 4096


def test_a_value_that_cannot_even_be_shown_is_a_spec_error() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(SpecError, match="nested"):
        JobSpec.parse({"argv": nested})


@given(
    st.sampled_from([*EXPECTED, "nonsense"]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    ),
)
def test_whatever_a_person_sends_is_a_job_or_a_spec_error(field: str, value: Any) -> None:
    try:
        JobSpec.parse({**GOOD, field: value})
    except SpecError as error:
        assert error.what and error.why and error.next


SPEC = JobSpec.parse(GOOD)
OWNED = msgspec.structs.replace(SPEC, owner=JobOwner("ann", 64001))
J1, H1 = JobId("j1"), HostId("h1")
COMMANDS: list[commands.Command] = [
    commands.Submitted(wall_s=1.0, key="0123456789", spec=SPEC),
    commands.Submitted(wall_s=1.0, key="0123456789", spec=OWNED, by="ann"),
    commands.Granted(wall_s=1.0, job=J1, epoch=1, coordinator=H1),
    commands.Placed(
        wall_s=1.0, job=J1, epoch=1, places=(Place(H1, (0,), ("g",)),), master_addr="10.0.0.1", master_port=20000
    ),
    commands.PlaceFailed(wall_s=1.0, job=J1, epoch=1, reason="no"),
    commands.RanksReported(wall_s=1.0, job=J1, epoch=1, host=H1, codes={0: -9}, step=3, metrics={"loss": 0.5}),
    commands.CancelAsked(wall_s=1.0, job=J1, by="bob"),
    commands.TimeLimitReached(wall_s=1.0, job=J1, epoch=1),
    commands.TakenBack(wall_s=1.0, job=J1, epoch=1, cause="host lost", reason="gone", lost=(H1,)),
    commands.Promoted(wall_s=1.0, job=J1, epoch=1),
    commands.QuotaSet(wall_s=1.0, tenant="*", gpus=4),
    commands.TenantSet(wall_s=1.0, tenant="ml", users=("ann",), sets_quota=True, gpus=4, before=(), by="root"),
    commands.Attained(wall_s=1.0, host=H1, service_gpu_s={J1: 5.0}),
]
TALK: list[wire.Talk] = [
    wire.Reserve(J1, 1, 1, 2, 1, True, 15.0),
    wire.Reserved(J1, 1, 1, ("g",), "10.0.0.1", 20000),
    wire.NotReserved(J1, 1, 1, 0, "no"),
    wire.Release(J1, 1, 1),
    wire.JobNow(J1),
    wire.JobNowAnswer(1, {0: 5}, 3, {"loss": 0.5}),
    wire.LogTail(J1, 0, -10, 100),
    wire.LogTailAnswer(b"x", 0, 1, False, H1),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_each_command_comes_back_as_it_went_in(command: commands.Command) -> None:
    assert commands.open_command(commands.pack(command)) == command


@pytest.mark.parametrize("message", TALK, ids=lambda message: type(message).__name__)
def test_each_message_comes_back_as_it_went_in(message: wire.Talk) -> None:
    assert wire.decoder.decode(msgspec.msgpack.encode(message)) == message


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "Granted", "wall_s": 1.0, "job": "j1", "epoch": -1, "coordinator": "h"},
        {"type": "Granted", "wall_s": float("nan"), "job": "j1", "epoch": 1, "coordinator": "h"},
        {"type": "QuotaSet", "wall_s": 1.0, "tenant": "A B", "gpus": 1},
        {"type": "QuotaSet", "wall_s": 1.0, "tenant": "a", "gpus": -1},
        {"type": "TenantSet", "wall_s": 1.0, "tenant": "ml", "users": ["the leader"]},
        {"type": "Attained", "wall_s": 1.0, "host": "h", "service_gpu_s": {"j1": -1.0}},
        {"type": "Attained", "wall_s": 1.0, "host": "h", "service_gpu_s": {"j1": float("inf")}},
        {"type": "PlaceFailed", "wall_s": 1.0, "job": "j1", "epoch": 1, "reason": "x" * 1001},
        {"type": "TakenBack", "wall_s": 1.0, "job": "j1", "epoch": 1, "cause": "spite", "reason": ""},
        {"type": "Placed", "wall_s": 1.0, "job": "j", "epoch": 1, "places": [], "master_addr": "", "master_port": 1},
        {"type": "Drop", "wall_s": 1.0},
    ],
)
def test_a_command_out_of_bounds_is_malformed(wrong: dict[str, Any]) -> None:
    with pytest.raises(commands.MalformedCommand):
        commands.open_command(msgspec.msgpack.encode({**wrong}))


def mutated(packed: list[bytes]) -> st.SearchStrategy[bytes]:
    def change(args: tuple[bytes, int, int, int]) -> bytes:
        data, at, value, cut = args
        at %= len(data)
        return (data[:at] + bytes([value]) + data[at + 1 :])[: len(data) - cut]

    parts = st.tuples(st.sampled_from(packed), st.integers(0, 10**4), st.integers(0, 255), st.integers(0, 4))
    return parts.map(change) | st.binary(max_size=200)


@given(mutated([commands.pack(command) for command in COMMANDS]))
@example(b"\x91" * 3000)
@example(b"\x00" * (commands.COMMAND_BYTES_MAX + 1))
def test_random_and_mutated_commands_are_opened_or_malformed(data: bytes) -> None:
    try:
        command = commands.open_command(data)
    except commands.MalformedCommand:
        return
    assert commands.open_command(commands.pack(command)) == command


@given(mutated([commands.pack(commands.Applied(J1)), commands.pack(commands.NotApplied(4, "a", "b", "c"))]))
def test_random_and_mutated_results_are_opened_or_malformed(data: bytes) -> None:
    try:
        result = commands.open_result(data)
    except commands.MalformedCommand:
        return
    assert commands.open_result(commands.pack(result)) == result


@given(mutated([msgspec.msgpack.encode(message) for message in TALK]))
@example(b"\x91" * 3000)
def test_random_and_mutated_messages_are_decoded_or_refused(data: bytes) -> None:
    try:
        message = wire.decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return
    assert wire.decoder.decode(msgspec.msgpack.encode(message)) == message
