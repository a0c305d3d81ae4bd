from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.config import Config, ConfigError, load, open_to_read, parse
from covey.core.ids import HostId

ENV = {"STATE_DIRECTORY": "/var/lib/covey", "RUNTIME_DIRECTORY": "/run/covey"}


def refused(tree: dict[str, Any]) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        parse(tree, "agent.toml", ENV)
    return error.value


def test_an_empty_file_works(tmp_path: Path) -> None:
    empty = tmp_path / "agent.toml"
    empty.write_text("")
    config = load(str(empty), ENV)
    assert config.state_dir == "/var/lib/covey"
    assert {"memory", "scheduler", "aggregator"} <= set(config.plugins)
    assert config.name


def test_a_wrong_key_names_the_place_and_the_nearest_valid_name() -> None:
    error = refused({"gossip": {"sedes": []}})
    assert "agent.toml" in error.what
    assert "gossip.sedes" in error.what
    assert "seeds" in error.why
    assert error.next == "did you mean `gossip.seeds`?"


def test_a_wrong_section_is_named_with_the_nearest_one() -> None:
    assert refused({"gosip": {}}).next == "did you mean `gossip`?"


def test_a_wrong_kind_of_value_says_what_was_expected() -> None:
    error = refused({"gpus": {"simulated": "two"}})
    assert "gpus.simulated" in error.what
    assert "int" in error.why


def test_a_value_out_of_range_is_refused_with_the_range() -> None:
    assert "0 to 64" in refused({"gpus": {"simulated": 1000}}).why


def test_a_size_that_is_none_is_refused_with_an_example() -> None:
    assert "64 MiB" in refused({"memory": {"slab": "lots"}}).why


def test_a_plugin_that_does_not_exist_is_refused() -> None:
    assert "plugins" in refused({"plugins": ["memory", "kitchen"]}).what


def test_only_the_plugins_named_are_on() -> None:
    assert list(parse({"plugins": ["memory"]}, "agent.toml", ENV).plugins) == ["memory"]


def test_a_run_dir_too_long_for_a_socket_is_refused() -> None:
    error = refused({"run_dir": "/tmp/" + "x" * 80})
    assert "107" in error.why


def test_what_is_not_toml_is_refused_with_its_line(tmp_path: Path) -> None:
    broken = tmp_path / "agent.toml"
    broken.write_text("name = 'gpu1'\n[gossip\n")
    with pytest.raises(ConfigError) as error:
        load(str(broken), ENV)
    assert "line 2" in error.value.why
    with pytest.raises(ConfigError, match="cannot read"):
        load(str(tmp_path / "absent.toml"), ENV)


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(["name", "gossip", "memory", "plugins", "x"]), _values, max_size=3))
def test_any_tree_is_a_config_or_a_clear_error(tree: dict[str, Any]) -> None:
    try:
        assert isinstance(parse(tree, "agent.toml", ENV), Config)
    except ConfigError as error:
        assert error.what
        assert error.why
        assert error.next


@pytest.mark.parametrize("address", ["nonsense", "8470", ":8470", "127.0.0.1:99999", "127.0.0.1:"])
@pytest.mark.parametrize("section", ["gossip", "control", "http"])
def test_a_bind_that_is_no_address_is_refused_before_anything_listens(section: str, address: str) -> None:
    error = refused({section: {"bind": address}})
    assert f"{section}.bind" in error.what
    assert "IP:PORT" in error.why


@pytest.mark.parametrize(
    "seed", ["gpu2", "gpu2:0", "gpu 2:7946", "-gpu2:7946", "gpu2:7946:7946", "::1:7946", "http://gpu2:7946", ":7946"]
)
def test_a_seed_that_is_no_address_is_refused(seed: str) -> None:
    error = refused({"gossip": {"seeds": ["10.0.0.1:7946", seed]}})
    assert "gossip.seeds" in error.what
    assert seed in error.why and "NAME:PORT" in error.why


@pytest.mark.parametrize("seed", ["gpu2:7946", "gpu-2.row_1.example.org:7946", "gpu2.:7946", "[fd00::1]:7946"])
def test_a_seed_may_be_a_name_or_an_ip(seed: str) -> None:
    assert parse({"gossip": {"seeds": [seed]}}, "agent.toml", ENV).gossip.seeds == (seed,)


@pytest.mark.parametrize("section", ["gossip", "control", "http"])
def test_a_name_is_nothing_to_listen_at(section: str) -> None:
    assert "not an IP of this host" in refused({section: {"bind": "gpu2:7946"}}).why


@pytest.mark.parametrize(
    "bind",
    [
        "0.0.0.0:8470",
        "10.0.0.7:0",
        "[::]:8470",
        "[fd00::7]:1",
        "[::ffff:10.0.0.7]:1",
        "[fe80::1%lo]:1",
        "169.254.1.1:2",
    ],
)
def test_everything_is_open_on_loopback_alone_and_other_hosts_that_differ_are_told(bind: str) -> None:
    assert not parse({"http": {"bind": bind}}, "agent.toml", ENV).http.read_open
    assert parse({"http": {"bind": "[::1]:1", "read_open": True}}, "agent.toml", ENV).http.read_open
    with pytest.raises(ConfigError) as no:
        parse({"http": {"bind": bind, "read_open": True}}, "agent.toml", ENV)
    assert "`http.read_open`" in no.value.what and bind in no.value.why and "agentctl login" in no.value.next
    (note,) = open_to_read([(HostId("gpu2"), bind), (HostId("gpu1"), "127.0.0.1:1"), (HostId("gpu0"), "")])
    assert f"anyone who can reach gpu2 ({bind}) may read all jobs" in note and "; next: " in note


@pytest.mark.parametrize("bind", ["", "127.0.0.1:8470", "127.9.9.9:1", "[::1]:0", "[::ffff:127.0.0.1]:1"])
def test_on_loopback_nothing_need_be_said(bind: str) -> None:
    assert parse({"http": {"bind": bind}}, "agent.toml", ENV).http.bind == bind
    assert open_to_read([(HostId("gpu1"), bind)]) == []


def test_what_another_host_says_it_listens_at_and_cannot_be_read_is_told() -> None:
    assert "gpu2 (what is this)" in open_to_read([(HostId("gpu2"), "what is this")])[0]


@pytest.mark.parametrize("name", ["http://gpu1", "gpu1:8470", "", "*.example.org", "a b", "10.0.0.7/8", "-x"])
def test_a_name_of_the_page_is_a_dns_name(name: str) -> None:
    assert "http.names" in refused({"http": {"names": ["gpu1.example.org", name]}}).what


@pytest.mark.parametrize("address", ["not an ip", "gpu1", "0.0.0.0", "::", "fe80::1"])
def test_an_address_that_no_peer_can_reach_is_not_advertised(address: str) -> None:
    assert "advertise" in refused({"advertise": address}).what


def test_a_knob_under_which_jobs_only_stop_one_another_is_refused_with_the_reason() -> None:
    assert "at least 1" in refused({"scheduler": {"promote_knob": 0.5}}).why


def test_inf_is_never_where_a_setting_may_be_never() -> None:
    """The settings' documentation says so: TOML has no word for nothing."""
    found = parse({"scheduler": {"demote_after_s": float("inf"), "promote_knob": float("inf")}}, "here", {})
    settings = found.plugins["scheduler"]
    assert (settings.demote_after_s, settings.promote_knob) == (None, None)  # type: ignore[attr-defined]
    assert "demote_after_s" in refused({"scheduler": {"demote_after_s": float("nan")}}).what


@pytest.mark.parametrize("wrong", [{"env_copies": -1}, {"placing_limit_s": 0.0}, {"coordinator_lost_after_s": -1.0}])
def test_settings_of_the_scheduler_that_mean_nothing_are_refused(wrong: dict[str, float]) -> None:
    assert "scheduler" in refused({"scheduler": wrong}).what


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_number_without_a_value_is_refused_with_its_key(number: float) -> None:
    assert "scheduler.host_lost_after_s" in refused({"scheduler": {"host_lost_after_s": number}}).what


def test_operators_are_users_and_groups_and_the_socket_has_a_group() -> None:
    config = parse({}, "agent.toml", ENV)
    assert (config.access.operators, config.http.group) == ((), "covey")
    config = parse({"access": {"operators": ["ann", "@wheel"]}, "http": {"group": ""}}, "agent.toml", ENV)
    assert (config.access.operators, config.http.group) == (("ann", "@wheel"), "")


@pytest.mark.parametrize("name", ["", "@", "a b", "@@wheel", "*", "ann,bob", "the leader", "-ann", "a\nb"])
def test_an_operator_is_a_name(name: str) -> None:
    error = refused({"access": {"operators": ["ann", name]}})
    assert "access.operators" in error.what and '["ann", "@wheel"]' in error.next
