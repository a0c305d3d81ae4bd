"""Tenants and their users in the log, whose job a submission is, and whom the event log names."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.core.errors import Refused
from covey.core.ids import JobId
from covey.ports.users import User
from plugins.askers import ASKER, Asker, OwnerUser
from plugins.scheduler.machine.log import job_starts
from plugins.scheduler.machine.log.job_table import TENANTS_MAX, JobTable
from plugins.scheduler.machine.log.queue import apply
from plugins.scheduler.machine.log.tenants import few, tenant_for
from plugins.scheduler.messages.commands import (
    Applied,
    CancelAsked,
    MalformedCommand,
    NotApplied,
    QuotaSet,
    Submitted,
    TenantSet,
    open_command,
    pack,
)
from plugins.scheduler.messages.spec import JobOwner, JobSpec
from plugins.scheduler.policy.explain import Never
from plugins.scheduler.service.tenants import Tenants
from tests.plugins.scheduler.rack import Rack, on_a_rack, operator, refused, submit, user
from tests.plugins.scheduler.test_queue import Told

ANN, BOB = user("ann", 64001), user("bob", 64002)


def tenant(name: str = "ml", *users: str, **more: Any) -> TenantSet:
    return TenantSet(wall_s=1.0, tenant=name, users=users, **more)


# ---- the log ---------------------------------------------------------------------------------------------------------


def test_users_of_a_tenant_are_set_changed_and_removed_and_each_is_told_once() -> None:
    told = Told()
    assert told.say(tenant("ml", "bob", "ann", by="root")) == Applied()
    assert told.queue.tenants == {"ml": ("ann", "bob")} and told.queue.tenants_of("ann") == ["ml"]
    assert told.say(tenant("ml", "ann", "bob")) == Applied(), "heard again"
    told.say(tenant("vision", "ann", sets_quota=True, gpus=4))
    assert told.queue.tenants_of("ann") == ["ml", "vision"] and told.queue.quota("vision") == 4
    told.say(tenant("ml"))
    assert told.queue.tenants == {"vision": ("ann",)} and told.queue.tenants_of("bob") == []
    assert told.notes == [("tenant/ml", "users set"), ("tenant/vision", "users set"), ("tenant/vision", "quota set"),
                          ("tenant/ml", "users set")]  # fmt: skip


def test_of_two_changes_decided_at_once_one_is_refused_and_a_repeated_one_is_not() -> None:
    told = Told()
    assert told.say(tenant("ml", "ann", before=())) == told.say(tenant("ml", "ann", before=())) == Applied()
    said = told.say(tenant("ml", "bob", before=()))
    assert isinstance(said, NotApplied) and said.why == "its users are ann by now, and not nobody"
    assert told.say(tenant("ml", "ann", "bob", before=("ann",))) == Applied()
    said = told.say(tenant("ml", before=("ann",)))
    assert isinstance(said, NotApplied) and said.why == "its users are ann, bob by now, and not ann"
    assert told.queue.tenants == {"ml": ("ann", "bob")}
    assert told.say(tenant("ml", "eve")) == Applied(), "whoever they were"


def test_a_quota_is_left_as_it_is_unless_one_is_given() -> None:
    told = Told()
    told.say(QuotaSet(wall_s=1.0, tenant="ml", gpus=8))
    told.say(tenant("ml", "ann"))
    assert told.queue.quotas == {"ml": 8}
    told.say(tenant("ml", "ann", sets_quota=True, gpus=None))
    assert told.queue.quotas == {"ml": None} and told.queue.quota("ml") is None
    told.say(tenant("ml"))
    assert told.queue.quotas == {"ml": None}, "who has jobs there keeps the quota"


def test_the_log_holds_a_bounded_number_of_tenants() -> None:
    told = Told()
    told.queue.tenants = {f"t{number}": ("ann",) for number in range(TENANTS_MAX)}
    assert isinstance(told.say(tenant("one-more", "ann")), NotApplied)
    assert told.say(tenant("t5", "bob")) == told.say(tenant("t6")) == told.say(tenant("one-more", "ann")) == Applied()


def test_events_of_the_log_name_who_asked() -> None:
    queue, said = JobTable(), list[tuple[str, str]]()
    spec = JobSpec.parse({"argv": ["train"]})
    for command in (
        tenant("ml", "ann", sets_quota=True, gpus=4, by="root"),
        QuotaSet(wall_s=1.0, tenant="ml", gpus=5, by="carol"),
        Submitted(wall_s=1.0, key="0123456789", spec=spec, by="ann"),
        CancelAsked(wall_s=1.0, job=JobId("j1"), by="bob"),
    ):
        _, notes = apply(queue, queue.index + 1, command)
        said += [(note.event, note.reason) for note in notes]
    assert said[0] == ("users set", "ann may submit for it, by root") and said[1] == ("quota set", "4 GPUs, by root")
    assert said[2] == ("quota set", "5 GPUs, by carol") and said[3][1].endswith(", by ann")
    assert said[4][0] == "cancelled" and "by bob" in said[4][1]


def test_the_users_are_in_a_snapshot_and_one_without_them_is_read() -> None:
    told, copy = Told(), JobTable()
    told.say(tenant("ml", "ann", "bob"))
    copy.restore(told.queue.snapshot())
    assert copy.tenants == {"ml": ("ann", "bob")}
    older = msgspec.msgpack.decode(told.queue.snapshot())
    del older["tenants"]
    copy.restore(msgspec.msgpack.encode(older))
    assert copy.tenants == {}


def test_a_key_is_its_owners_alone() -> None:
    """Else whoever submits with another's key is given that job instead of an own one, or keeps its owner from one."""
    spec = JobSpec.parse({"argv": ["train"]})
    owners = [JobOwner("ann", 64001), JobOwner("ann", 64002), JobOwner("bob", 64001), JobOwner("bob", 64002)]
    keys = [Tenants.key("0123456789", msgspec.structs.replace(spec, owner=owner)) for owner in owners]
    assert len({"0123456789", *keys}) == 5, keys
    anns = msgspec.structs.replace(spec, owner=owners[0])
    assert Tenants.key("0123456789", anns) == keys[0] != Tenants.key("0123456780", anns)
    assert Tenants.key("0123456789", spec) == "0123456789", "the agent's own is as older agents wrote it"
    for key in keys:
        assert isinstance(open_command(pack(Submitted(wall_s=1.0, key=key, spec=anns))), Submitted)


def test_a_submission_of_an_older_version_is_the_agents_own_users() -> None:
    spec = JobSpec.parse({"argv": ["train"]})
    older = msgspec.msgpack.decode(pack(Submitted(wall_s=1.0, key="0123456789", spec=spec)))
    del older["spec"]["owner"], older["by"]
    found = open_command(msgspec.msgpack.encode(older))
    assert isinstance(found, Submitted) and found.spec.owner is None and found.by == ""


@pytest.mark.parametrize("wrong", [{"users": ["a b"]}, {"users": ["the leader"]}, {"users": [""]}, {"tenant": "*"},
                                   {"users": ["a"] * 201}, {"users": "ann"}, {"gpus": -1}])  # fmt: skip
def test_what_is_no_tenant_is_no_command(wrong: dict[str, Any]) -> None:
    good = msgspec.msgpack.decode(pack(tenant("ml", "ann", sets_quota=True, gpus=4)))
    assert open_command(msgspec.msgpack.encode(good)) == tenant("ml", "ann", sets_quota=True, gpus=4)
    with pytest.raises(MalformedCommand):
        open_command(msgspec.msgpack.encode({**good, **wrong}))


@pytest.mark.parametrize(("limit", "most"), [("LIVE_MAX", 12), ("LIVE_BYTES_MAX", 5000)])
def test_no_user_fills_the_log_alone(limit: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_starts, limit, most)
    told = Told()
    spec = JobSpec.parse({"argv": ["train", "x" * 50]})
    owned = {name: msgspec.structs.replace(spec, owner=JobOwner(name, uid)) for name, uid in (("ann", 5), ("bob", 6))}

    def submitted(spec: JobSpec) -> Any:
        return told.say(Submitted(wall_s=1.0, key=f"key-{told.queue.index:08}", spec=spec))

    taken = 0
    while isinstance(said := submitted(owned["ann"]), Applied):
        taken += 1
    assert 1 <= taken <= most // 4 and said.code == 4 and "jobs of ann" in said.why and said.next
    assert isinstance(submitted(owned["bob"]), Applied) and isinstance(submitted(spec), Applied)
    copy = JobTable()
    copy.restore(told.queue.snapshot())
    assert copy.kept_bytes.users == told.queue.kept_bytes.users and copy.kept_bytes.users["ann"].jobs == taken
    told.say(CancelAsked(wall_s=1.0, job=JobId("j1")))
    assert isinstance(submitted(owned["ann"]), Applied)


# ---- which tenant ----------------------------------------------------------------------------------------------------


def test_a_job_counts_against_the_users_only_tenant_or_the_one_that_is_chosen() -> None:
    tenants = {"ml": ("ann", "bob"), "vision": ("bob",), "red": ("carol",)}
    assert tenant_for("ann", None, tenants) == tenant_for("ann", "ml", tenants) == "ml"
    assert tenant_for("bob", "vision", tenants) == "vision"
    for name, wanted, why in (
        ("ann", "red", "ann is in ml, and not in tenant red"),
        ("bob", None, "bob is in several tenants, ml, vision, and the job's quota is one tenant's"),
        ("eve", None, "eve is in no tenant"),
        ("eve", "ml", "eve is in no tenant"),
        ("ann", "default", "ann is in ml, and not in tenant default"),
        ("ann", "", "ann is in ml, and not in tenant "),
    ):
        never = tenant_for(name, wanted, tenants)
        assert isinstance(never, Never) and (never.code, never.why) == (4, why) and never.what and never.next


@given(st.text(max_size=4), st.none() | st.sampled_from(["ml", "red"]),
       st.dictionaries(st.sampled_from(["ml", "red"]), st.lists(st.text(max_size=4), max_size=3)))  # fmt: skip
def test_no_user_gets_a_tenant_that_does_not_have_the_user(
    name: str, wanted: str | None, tenants: dict[str, list[str]]
) -> None:
    found = tenant_for(name, wanted, tenants)
    assert isinstance(found, Never) or (name in tenants[found] and wanted in (None, found))


def test_many_names_are_counted() -> None:
    assert few([]) == "" and few(["a", "b"]) == "a, b" and few([str(n) for n in range(11)]).endswith("7 and 3 more")


# ---- submitting ------------------------------------------------------------------------------------------------------


@on_a_rack()
async def test_a_users_job_has_its_user_and_tenant_on_every_host(rack: Rack) -> None:
    await rack["gpu1"].call("tenant_set", tenant="ml", users=["ann"])
    view = await rack["gpu3"].call("submit", asker=ANN, argv=["./train.py"], cwd="/tmp")
    assert (view.user, view.uid, view.tenant) == ("ann", 64001, "ml")
    await rack["gpu2"].service.queue_log.barrier()
    for host in rack.hosts.values():
        assert host.service.queue.jobs[view.id].spec.owner == JobOwner("ann", 64001)
        assert await host.service.whose(view.id) == OwnerUser("ann", 64001)


@on_a_rack()
async def test_a_job_of_the_agents_own_user_or_of_root_is_as_ever(rack: Rack) -> None:
    view = await submit(rack, workers=1, tenant="red")
    assert (view.user, view.uid, view.tenant) == ("", None, "red")
    assert rack["gpu1"].service.queue.jobs[view.id].spec.owner is None
    assert await rack["gpu2"].service.whose(view.id) == OwnerUser()


@on_a_rack()
async def test_an_operator_submits_for_any_tenant_and_as_who_they_are(rack: Rack) -> None:
    carol = Asker(64011, "carol", "operator")
    for wanted, got in ((None, "default"), ("red", "red")):
        view = await rack["gpu1"].call("submit", asker=carol, argv=["./train.py"], cwd="/tmp", tenant=wanted)
        assert (view.user, view.uid, view.tenant) == ("carol", 64011, got)


@on_a_rack()
async def test_a_submission_that_claims_a_tenant_or_an_owner_is_refused_in_three_lines(rack: Rack) -> None:
    await rack["gpu1"].call("tenant_set", tenant="ml", users=["ann", "bob"])
    await rack["gpu1"].call("tenant_set", tenant="vision", users=["bob"])

    async def said(asker: Asker, **more: Any) -> Refused:
        no = await refused(rack["gpu2"].call("submit", asker=asker, argv=["./train.py"], cwd="/tmp", **more))
        assert no.what and no.why and no.next
        return no

    assert (await said(ANN, tenant="vision")).why == "ann is in ml, and not in tenant vision"
    assert (await said(ANN, spec={"argv": ["x"], "tenant": "vision"})).code == 4
    assert "several tenants" in (await said(BOB)).why
    assert "in no tenant" in (await said(user("eve", 64003), tenant="ml")).why
    assert (await said(ANN, owner={"user": "bob", "uid": 64002})).code == 2
    assert (await said(ANN, spec={"argv": ["x"], "asker": "root"})).code == 2
    assert "no name that other hosts" in (await said(Asker(64099, "", "user"), tenant="ml")).why
    assert (await refused(rack["gpu2"].service.commands()["submit"]({"argv": ["x"]}))).code == 4
    assert not rack["gpu1"].service.queue.jobs


@on_a_rack()
async def test_of_many_submissions_with_one_key_there_is_one_job_for_each_user(rack: Rack) -> None:
    await rack["gpu1"].call("tenant_set", tenant="ml", users=["ann", "bob"])
    asked = {"argv": ["./train.py"], "cwd": "/tmp", "key": "the-same-key"}
    found = [await rack[host].call("submit", asker=asker, **asked)
             for host, asker in (("gpu1", ANN), ("gpu1", BOB), ("gpu2", BOB), ("gpu3", ANN))]  # fmt: skip
    assert [view.user for view in found] == ["ann", "bob", "bob", "ann"]
    assert found[0].id == found[3].id != found[1].id == found[2].id
    no = await refused(rack["gpu1"].call("submit", asker=ANN, **{**asked, "key": "short"}))
    assert no.what == "invalid key"


# ---- changing tenants ------------------------------------------------------------------------------------------------


@on_a_rack()
async def test_users_are_added_and_removed_one_by_one(rack: Rack) -> None:
    at = rack["gpu2"]
    view = await at.call("tenant_set", tenant="ml", users=["bob", "ann"], gpus=16, is_new=True)
    assert (view.tenant, view.users, view.gpus, view.used) == ("ml", ("ann", "bob"), 16, 0)
    assert (await refused(at.call("tenant_set", tenant="ml", users=["bob"], is_new=True))).code == 4
    assert (await at.call("tenant_set", tenant="ml", remove=["bob", "nobody"])).users == ("ann",)
    assert (await at.call("tenant_set", tenant="ml", add=["bob"], gpus=None)).gpus is None
    assert [row.users for row in await rack["gpu1"].call("tenants")] == [("ann", "bob")]
    assert (await at.call("tenant_set", tenant="ml", users=[])).users == ()
    assert await at.call("tenants") == [type(view)("ml", (), None, 0)], "its quota stays, and says no limit"
    await at.call("quota_set", tenant="red", gpus=4)
    assert [row.tenant for row in await at.call("tenants")] == ["ml", "red"]


@on_a_rack()
async def test_a_user_that_this_host_does_not_know_is_in_no_tenant(rack: Rack) -> None:
    no = await refused(rack["gpu1"].call("tenant_set", tenant="ml", users=["ann", "mallory"]))
    assert (no.code, no.why) == (4, "gpu1 knows no user 'mallory'") and "getent passwd mallory" in no.next
    assert rack["gpu1"].service.queue.tenants == {}
    await rack["gpu1"].call("tenant_set", tenant="ml", users=["ann", "bob"])
    rack["gpu1"].env.users._users = (User("bob", 64002),)  # type: ignore[attr-defined]  # ann's account is deleted
    assert (await rack["gpu1"].call("tenant_set", tenant="ml", gpus=4)).users == ("ann", "bob")
    assert (await rack["gpu1"].call("tenant_set", tenant="ml", remove=["ann"])).users == ("bob",)
    assert (await refused(rack["gpu1"].call("tenant_set", tenant="ml", add=["ann"]))).code == 4


@on_a_rack()
async def test_what_is_no_change_of_a_tenant_is_refused_in_words(rack: Rack) -> None:
    for wrong in (
        {"tenant": "*", "users": ["ann"]},
        {"tenant": None, "users": ["ann"]},
        {"tenant": "../x", "users": []},
        {"tenant": "ml", "users": "ann"},
        {"tenant": "ml", "users": [1]},
        {"tenant": "ml", "users": ["a b"]},
        {"tenant": "ml", "add": {"ann": 1}},
        {"tenant": "ml", "users": ["ann"], "gpus": "many"},
        {},
    ):
        no = await refused(rack["gpu1"].call("tenant_set", **wrong))
        assert no.code == 2 and no.what and no.why and no.next, wrong
    assert rack["gpu1"].service.queue.tenants == {}


@on_a_rack()
async def test_the_log_has_the_kernels_word_for_who_asked_and_no_other(rack: Rack) -> None:
    at, id = rack["gpu1"], (await submit(rack, workers=1)).id
    for command, given_ in (
        ("quota_set", {"tenant": "red", "gpus": 4}),
        ("tenant_set", {"tenant": "ml", "users": ["ann"]}),
        ("drain", {"id": "gpu4"}),
        ("resume", {"id": "gpu4"}),
        ("cancel", {"id": id}),
    ):
        no = await refused(at.service.commands()[command]({**given_, "by": "root", ASKER: {"uid": 0}}))
        assert no.code == 4, command
        await at.call(command, asker=operator("carol"), by="the leader", **given_)
    said = [reason for host in rack.hosts.values() for _, _, reason, _ in host.notes]
    assert sum("carol" in reason for reason in said) >= 5 and not any("the leader" in reason for reason in said)
