"""Who may do what: every command by each role, what is shown of what belongs to others, and every field of it."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.api.access import RULES, NotAllowed, job_outline, own_volume, refusal, role_of, rules_of, shown_to
from agent.api.gathering import Gathered
from chaos.askers import ANN, BOB, EVE, ROOT, VISITOR
from chaos.rackworld import SimRack
from covey.core.ids import HostId
from plugins.askers import Asker, OwnerUser
from plugins.base import Plugin
from plugins.registry import PLUGINS
from plugins.views import EventLine, JobView, VolumeView
from tests.compatibility.samples import sample
from tests.families import examples

ANNS, BOBS, AGENTS = OwnerUser("ann", ANN.uid), OwnerUser("bob", BOB.uid), OwnerUser()
READER = msgspec.structs.replace(VISITOR, reads_all=True)
"""Whoever connects to a host with `read_open`."""
LOOKS = """scheduler.starts agent.keys agent.local_keys agent.gossip agent.local_gossip
    agent.hosts agent.gpus agent.local_gpus agent.leader agent.local_voter agent.voters agent.health agent.why
    agent.local_clock agent.links agent.local_paths agent.ping agent.events agent.rack_events
    agent.story agent.rack_slabs agent.rack_volumes agent.rack_tensors agent.rack_shared_gpus agent.rack_interference
    agent.rack_groups scheduler.jobs scheduler.starts scheduler.job scheduler.quotas scheduler.tenants scheduler.rack
    scheduler.gpu_uses scheduler.history scheduler.report scheduler.report_job agent.history agent.report
    memory.volumes memory.slabs memory.accounts aggregator.tensors sharing.gpus sharing.interference
    interleave.groups""".split()  # noqa: SIM905
PRIVATE = ["scheduler.env"]
"""Not for those who may read all, either."""
OWN_READS = ["scheduler.logs", "scheduler.curve", "tuner.show", *PRIVATE]
OWN_CHANGES = """scheduler.cancel scheduler.move scheduler.scale scheduler.arrange scheduler.tune memory.remove
    scheduler.hold scheduler.release scheduler.requeue scheduler.priority scheduler.update
    memory.give_up agent.open_session agent.turn_session agent.stacks scheduler.checkpoint""".split()  # noqa: SIM905
LOGS_IN = ["agent.login"]
USES = ["scheduler.submit", "scheduler.start_of", "memory.create"]
OPERATES = """agent.turn_keys agent.make_token
    agent.forget_gpu agent.change_voters scheduler.give_up scheduler.drain scheduler.resume
    scheduler.cordon scheduler.uncordon scheduler.forget scheduler.knows agent.forget_host
    scheduler.quota_set scheduler.tenant_set memory.export memory.swap aggregator.move""".split()  # noqa: SIM905
EVERY = [*LOOKS, *OWN_READS, *OWN_CHANGES, *LOGS_IN, *USES, *OPERATES]


def may(asker: Asker, command: str, owner: OwnerUser | None = None) -> bool:
    return refusal(asker, command, RULES.get(command), owner) is None


# ---- the table -------------------------------------------------------------------------------------------------------


def test_every_command_of_an_agent_is_in_the_table_and_nothing_else_is() -> None:
    with SimRack(7, hosts=1, plugins=PLUGINS, watched=False).start() as rack:
        rack.run(20)
        commands = set(rack.agents["h1"].commands)
    assert commands == RULES.keys() == {*EVERY}, "a new command: who may ask for it?"


@pytest.mark.parametrize("command", EVERY)
def test_each_role_may_what_it_may_and_no_more(command: str) -> None:
    by_role = {
        name: [may(asker, command, owner) for owner in (ANNS, BOBS, AGENTS, None)]
        for name, asker in (("root", ROOT), ("ann", ANN), ("eve", EVE), ("visitor", VISITOR), ("reader", READER))
    }
    all_of, none_of, own = [True] * 4, [False] * 4, [True, False, False, False]
    expected: Mapping[str, list[bool]] = {"root": all_of, "ann": all_of, "eve": all_of, "visitor": all_of}
    if command not in LOOKS:
        expected = {"root": all_of, "ann": none_of, "eve": none_of, "visitor": none_of}
    if command in USES:
        expected = {**expected, "ann": all_of}
    if command in LOGS_IN:
        expected = {"root": none_of, "ann": all_of, "eve": all_of, "visitor": none_of}
    if command in (*OWN_READS, *OWN_CHANGES):
        expected = {**expected, "ann": own}
    reads = command in (*LOOKS, *OWN_READS) and command not in PRIVATE
    assert by_role == {**expected, "reader": all_of if reads else none_of}


def test_a_command_that_is_not_in_the_table_is_refused_to_everybody() -> None:
    for asker in (ROOT, ANN, EVE, VISITOR, READER):
        assert not may(asker, "scheduler.new") and not may(asker, "", ANNS)


def test_an_owner_is_known_by_name_and_number_together() -> None:
    """On another host somebody else may have the name, or the number."""
    for asker in (Asker(ANN.uid, "bob", "user"), Asker(BOB.uid, "ann", "user"), Asker(ANN.uid, "", "user")):
        assert not may(asker, "scheduler.cancel", ANNS), asker
    assert may(ANN, "memory.remove", OwnerUser(uid=ANN.uid)), "volumes are known by number, on their host"
    assert not may(Asker(-1, "", "user"), "memory.remove", OwnerUser(uid=None))


def test_an_owner_out_of_all_tenants_reads_and_ends_the_own_and_takes_no_more() -> None:
    """The job still runs: nobody else may end it but operators."""
    eves = OwnerUser("eve", EVE.uid)
    takes = {
        "agent.open_session",
        "scheduler.checkpoint",
        "agent.turn_session",
        "agent.stacks",
        "scheduler.move",
        "scheduler.scale",
        "scheduler.arrange",
        "scheduler.tune",
    }
    takes |= {f"scheduler.{verb}" for verb in ("hold", "release", "requeue", "priority", "update", "checkpoint")}
    for command in (*OWN_READS, *OWN_CHANGES):
        assert may(EVE, command, eves) == (command not in takes), command
        assert not may(EVE, command, ANNS) and not may(EVE, command, None), command
    assert not any(may(EVE, command, eves) for command in (*USES, *OPERATES))


@pytest.mark.parametrize("command", [*OWN_READS, *OWN_CHANGES, *USES, *OPERATES, "none.such"])
@pytest.mark.parametrize("asker", [ANN, EVE, VISITOR])
@pytest.mark.parametrize("owner", [BOBS, AGENTS, OwnerUser(uid=5), None])
def test_a_refusal_is_three_lines(command: str, asker: Asker, owner: OwnerUser | None) -> None:
    no = refusal(asker, command, RULES.get(command), owner)
    assert no is None or all(line and "\n" not in line for line in no)
    assert no is not None or (asker is ANN and command in USES)


def test_whoever_is_refused_is_told_whose_it_is_and_whom_to_ask() -> None:
    def said(asker: Asker, command: str, owner: OwnerUser | None = None) -> NotAllowed:
        no = refusal(asker, command, RULES[command], owner)
        assert no is not None
        return no

    assert said(ANN, "scheduler.cancel", BOBS).why == "the job belongs to bob, and ann is somebody else"
    assert (
        said(ANN, "scheduler.logs", AGENTS).why == "the job belongs to the agent's own user, and ann is somebody else"
    )
    assert "over TCP it cannot be told who asks" in said(VISITOR, "scheduler.logs", BOBS).why
    assert said(EVE, "scheduler.submit").next == "ask an operator: agentctl tenant set TENANT --add eve"
    assert said(ANN, "scheduler.drain").why == "scheduler.drain is for operators, and ann is a user"


def test_whom_the_kernel_names_logs_in_and_root_and_the_agents_user_do_not() -> None:
    """A script of a job without an owner runs as the agent's own user, and would keep its rights."""
    carol = Asker(64011, "carol", "operator")
    assert may(ANN, "agent.login") and may(EVE, "agent.login") and may(carol, "agent.login")
    own = Asker(990, "covey", "operator", is_agent=True)
    for asker in (ROOT, own, VISITOR, READER, *(msgspec.structs.replace(a, by_certificate=True) for a in (ANN, carol))):
        no = refusal(asker, "agent.login", RULES["agent.login"], None)
        assert no is not None and all(no) and "agentctl login" in no.next


def test_a_plugin_says_who_may_ask_for_its_commands_and_changes_no_other_rule() -> None:
    said: dict[str, Any] = {"hints": "anybody", "shake": "operators"}
    kind: Any = None
    own = Plugin("load", "none", kind, kind, kind, asked_by=said)
    thief = Plugin("scheduler", "none", kind, kind, kind, asked_by={"drain": "anybody"})
    rules = rules_of([own, thief])
    assert (rules["load.hints"].needs, rules["load.shake"].needs) == ("look", "operate")
    assert rules["scheduler.drain"] == RULES["scheduler.drain"] and "load.none" not in rules


# ---- roles -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "operators", "tenants", "role"),
    [
        ((), (), (), "viewer"),
        ((), (), ("ml",), "user"),
        ((), ("ann",), (), "operator"),
        (("wheel",), ("@wheel",), ("ml",), "operator"),
        (("wheel",), ("wheel",), (), "viewer"),
        (("ann",), ("@bob",), ("ml",), "user"),
        (("staff",), ("@wheel", "bob"), (), "viewer"),
    ],
)
def test_a_role_follows_from_names_groups_and_tenants(
    groups: tuple[str, ...], operators: tuple[str, ...], tenants: tuple[str, ...], role: str
) -> None:
    assert role_of("ann", groups, operators, tenants) == role


# ---- volumes ---------------------------------------------------------------------------------------------------------


def test_a_users_volume_is_the_users_own_and_counts_against_an_own_tenant() -> None:
    asked = {"volume": "v1", "size": "1MiB"}
    assert own_volume(ANN, asked, ["ml"]) == {**asked, "uid": ANN.uid, "tenant": "ml"}
    assert own_volume(ANN, {**asked, "uid": ANN.uid, "tenant": "vision"}, ["ml", "vision"]) == {
        **asked,
        "uid": ANN.uid,
        "tenant": "vision",
    }
    for wrong in ({"uid": BOB.uid}, {"uid": -1}, {"uid": 0}, {"uid": None}, {"create": True}, {"tenant": "red"}):
        found = own_volume(ANN, {**asked, "tenant": "ml", **wrong}, ["ml", "vision"])
        assert isinstance(found, NotAllowed) and all(found), wrong
    for tenants in (["ml", "vision"], []):
        assert isinstance(own_volume(ANN, asked, tenants), NotAllowed)
    assert own_volume(ROOT, {**asked, "uid": 5, "create": True}, []) == {**asked, "uid": 5, "create": True}


# ---- what is shown ---------------------------------------------------------------------------------------------------

SHOWN = {
    *("id", "tenant", "job_class", "runs_as", "state", "over", "workers", "gpus", "times", "queue", "attained_gpu_s"),
    *("epoch", "coordinator", "exit_code", "places", "beside", "reserved_gpus", "age_s", "user", "uid"),
    *("array", "task", "held", "after", "begin_wall_s", "time_limit_s", "turn"),
}
"""Fields of a job that are shown to everybody as they are."""
PARTLY = {"reason", "tally", "losses"}


def a_job(**more: Any) -> JobView:
    """A job of bob's, with something in every field."""
    whole = sample(JobView)
    assert isinstance(whole, JobView)
    said = {"user": "bob", "uid": BOB.uid, "state": "running", "argv": ("secret",), "cwd": "/secret", **more}
    return msgspec.structs.replace(whole, name="secret", reason="secret", metrics={"secret": 1.0}, **said)


def test_of_anothers_job_nothing_is_shown_but_what_all_may_know() -> None:
    job = a_job(losses=msgspec.structs.replace(a_job().losses, heals_not="secret", hang_unseen="secret"))
    shown = job_outline(job)
    empty = JobView(
        id=job.id, name="", tenant="", job_class="", state="", over=False, reason="", workers=0, gpus=0, argv=(),
        cwd="", times=job.times, tally=shown.tally, losses=shown.losses, seen=type(job.seen)(),
    )  # fmt: skip
    for field in msgspec.structs.fields(JobView):
        kept = getattr(shown, field.name)
        expected = getattr(job if field.name in SHOWN else empty, field.name)
        assert field.name in PARTLY or kept == expected, f"{field.name}: is it for everybody?"
    assert b"secret" not in msgspec.json.encode(shown)
    assert shown.tally.attempt == job.tally.attempt and not shown.tally.failures and not shown.losses.heals_not


def test_a_waiting_jobs_place_in_the_queue_is_shown_and_what_was_before_is_not() -> None:
    waits = a_job(state="queued")
    waits = msgspec.structs.replace(waits, reason="2nd of the waiting jobs, in queue 0; before: secret: No such file")
    assert job_outline(waits).reason == "2nd of the waiting jobs, in queue 0"
    assert job_outline(a_job(state="failed")).reason == ""


def test_a_list_shows_own_jobs_whole_and_those_of_others_in_outline() -> None:
    mine, bobs = a_job(user="ann", uid=ANN.uid), a_job()
    agents = a_job(user="", uid=None)
    for wrap in (list, tuple):
        shown = shown_to(ANN, wrap([mine, bobs, agents]))
        assert shown == [mine, job_outline(bobs), job_outline(agents)]
    assert shown_to(ANN, Gathered([bobs])).data == [job_outline(bobs)]
    for asker in (ROOT, READER):
        assert shown_to(asker, [mine, bobs, agents]) == [mine, bobs, agents]
    for asker in (EVE, VISITOR):
        assert shown_to(asker, agents) == job_outline(agents) and shown_to(asker, mine) == job_outline(mine)


def test_a_volumes_path_and_troubles_are_for_its_owner() -> None:
    whole = sample(VolumeView)
    assert isinstance(whole, VolumeView)
    anns = msgspec.structs.replace(whole, uid=ANN.uid, path="/run/secret", trouble="/var/secret: no room")
    nobodys = msgspec.structs.replace(anns, uid=-1)
    assert shown_to(ANN, [anns])[0] == anns
    nobody = Asker(-1, "", "viewer")
    for asker, volume in ((BOB, anns), (ANN, nobodys), (VISITOR, nobodys), (nobody, nobodys), (EVE, anns)):
        (shown,) = shown_to(asker, [volume])
        assert (shown.path, shown.trouble, shown.volume) == ("", "", whole.volume), asker
    assert shown_to(ROOT, nobodys) == nobodys


@pytest.mark.parametrize(
    ("subject", "event", "is_shown"),
    [
        ("j1", "submitted", False), ("j1", "failed", False), ("j1", "ranks ended", False), ("j1", "granted", True),
        ("j1", "upgraded", True), ("job/j1", "not started", False), ("volume/v1", "exported", False),
        ("slab/v1/0", "moved", False), ("host/h1", "host drained", True), ("gpu/G", "sick", True),
        ("tenant/ml", "quota set", True), ("j1", "a new event", False), ("", "granted", True),
    ],
)  # fmt: skip
def test_words_of_an_event_are_for_the_owner_of_its_subject(subject: str, event: str, is_shown: bool) -> None:
    line = EventLine(1.0, HostId("h1"), subject, event, "python /home/bob/secret.py", "log/1")
    for asker in (ANN, EVE, VISITOR):
        (shown,) = shown_to(asker, Gathered([line])).data
        assert (shown.reason != "", shown.event, shown.subject) == (is_shown, event, subject)
        assert shown_to(asker, [line], lambda _line: True) == [line]
    assert shown_to(ROOT, [line]) == shown_to(READER, [line]) == [line]


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(-1, 1 << 32), st.text(max_size=8), st.sampled_from(["operator", "user", "viewer"]),
       st.text(max_size=20) | st.sampled_from(EVERY), st.none() | st.builds(OwnerUser, st.text(max_size=8),
       st.none() | st.integers(-1, 1 << 32)))  # fmt: skip
def test_whoever_asks_whatever_they_may_or_are_told_why_not(
    uid: int, name: str, role: Any, command: str, owner: OwnerUser | None
) -> None:
    asker = Asker(uid, name, role)
    no = refusal(asker, command, RULES.get(command), owner)
    if no is None:
        assert command in RULES
        assert role == "operator" or command in (*LOOKS, *USES, *LOGS_IN) or (owner is not None and owner.uid == uid)
        assert command not in LOGS_IN or uid >= 0
    else:
        assert all(no) and (role != "operator" or command not in RULES or command in LOGS_IN)


def test_a_rule_that_needs_an_owner_says_of_what() -> None:
    for command, rule in RULES.items():
        assert rule.needs != "own" or rule.of, command
        assert rule.changes or rule.needs in ("look", "own"), command
        assert not rule.noted or rule.changes, command
        assert not rule.ends or (rule.needs == "own" and rule.changes), command
