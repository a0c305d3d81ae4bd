"""A rack written as the documents write it, `seeds = ["gpu1:7946"]`, forms; whoever is not known is named."""

from chaos.rackworld import SimRack

NAMED = {"gossip": {"seeds": ["h1:7946", "h2:7946"]}}


def alive(rack: SimRack, on: str) -> set[str]:
    return {view.host for view in rack.agents[on].hosts() if view.state == "alive"}


def test_a_rack_whose_seeds_are_names_forms() -> None:
    with SimRack(3, hosts=4, settings=NAMED) as rack:
        rack.start()
        rack.run(10.0)
        for name in rack.hosts:
            assert alive(rack, name) == set(rack.hosts)
            assert rack.ask(name, "agent.health", {})["seeds_unknown"] == {}
            assert rack.agents[name].gossip.counters.get("not_sent", 0) == 0


def test_a_rack_that_boots_before_its_name_server_forms_once_that_answers() -> None:
    with SimRack(4, hosts=4, settings=NAMED) as rack:
        known, rack.world.network.names = rack.world.network.names, {}
        rack.start()
        rack.run(40.0)
        assert alive(rack, "h3") == {"h3"}
        assert set(rack.ask("h3", "agent.health", {})["seeds_unknown"]) == {"h1:7946", "h2:7946"}
        assert rack.agents["h3"].gossip.counters.get("sent", 0) == 0, "what was not sent is not counted"
        rack.world.network.names = known
        rack.run(10.0)
        assert all(alive(rack, name) == set(rack.hosts) for name in rack.hosts)
        assert rack.ask("h3", "agent.health", {})["seeds_unknown"] == {}


def test_a_seed_that_moved_is_called_at_its_new_address_within_30_s() -> None:
    """The whole rack but h3 gets other addresses while h3 is cut off: h3 has nothing but the names."""
    with SimRack(5, hosts=4, settings={"gossip": {"seeds": ["seed:7946"]}}) as rack:
        names = rack.world.network.names
        names["seed"] = (rack.hosts["h1"].ip,)
        rack.start()
        rack.run(10.0)
        assert alive(rack, "h4") == set(rack.hosts)
        names["seed"] = (rack.hosts["h2"].ip,)
        rack.run(31.0)
        seeds = rack.agents["h4"].gossip._seeds
        assert seeds is not None
        assert seeds.addresses == (f"{rack.hosts['h2'].ip}:7946",)
