"""What a changed agent.toml means for an agent that runs."""

from typing import Any

from agent.config import Config, parse
from agent.etc.origins import settings_of
from agent.etc.reload import LIVE, applied, compared, part_of


def config(**sections: Any) -> Config:
    return parse({"name": "gpu1", **sections}, "agent.toml", {})


def differs(before: Config, now: Config) -> tuple[list[str], list[str]]:
    found = compared(settings_of(before), settings_of(now))
    return list(found.live), list(found.restart)


def test_nothing_changed_is_said() -> None:
    assert compared(settings_of(config()), settings_of(config())).told == "nothing has changed"


def test_what_is_live_is_applied_and_the_rest_waits_for_a_restart() -> None:
    now = config(log={"level": "debug"}, gossip={"seeds": ["gpu2:7946"]}, jobs={"keep_ended": 5})
    found = compared(settings_of(config()), settings_of(now))
    assert found.told == "applied live: jobs.keep_ended, log.level; needs a restart: gossip.seeds"
    in_force = applied(config(), now, found.live)
    assert (in_force.log.level, in_force.jobs.keep_ended, in_force.gossip.seeds) == ("debug", 5, ())


def test_a_budget_is_applied_and_the_rest_of_its_plugin_is_not() -> None:
    now = config(memory={"budgets": {"vision": "1 GiB"}, "page": "8 KiB"})
    assert differs(config(), now) == (["memory.budgets"], ["memory.page"])
    memory: Any = part_of(applied(config(), now, ["memory.budgets"]), "memory")
    assert (memory.budgets, memory.page) == ({"vision": "1 GiB"}, "4 KiB")


def test_a_plugin_that_is_switched_off_waits_for_a_restart() -> None:
    assert differs(config(), config(plugins=["scheduler"])) == ([], ["plugins"])


def test_every_live_setting_can_be_applied() -> None:
    assert applied(config(), config(), LIVE) == config()
