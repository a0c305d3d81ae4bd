"""What an agent measures, for `/metrics`: the series of its plugins, of its own parts, and of its ports that count."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol, get_args, runtime_checkable

from agent import metrics
from agent.jobs.runner import SupervisedRunner
from agent.jobs.socket.jobs_socket import JobSocket
from agent.keyring.service import HostKeyring
from agent.raft.service import Consensus
from agent.rpc.rpc import Messenger
from agent.runtime.plugin_runtime import PluginRuntime
from covey.core.ids import HostId
from covey.core.metrics import Distribution, Measured, MetricSeries, Tally
from covey.ports.env import Env
from covey.ports.starter import LooksAgain
from gossip.service import GossipService
from plugins.base import PluginService
from plugins.facts import HostState, HostView
from plugins.views import PluginHealth, Trouble

STATES: tuple[HostState, ...] = get_args(HostState)


@runtime_checkable
class CountedLinks(Protocol):
    """Links that count what happens to them: the real ones."""

    @property
    def counters(self) -> Mapping[str, int]: ...
    def metrics(self) -> Mapping[MetricSeries, float]: ...


@runtime_checkable
class CountedDevices(Protocol):
    """Devices that count what happens to their driver."""

    @property
    def counters(self) -> Mapping[str, int]: ...


class MeasuredAgent(Protocol):
    """What this file needs of the agent."""

    env: Env
    gossip: GossipService
    jobs: JobSocket
    keyring: HostKeyring
    log: Consensus
    loop_lags: Tally
    messenger: Messenger
    plugin_runtime: PluginRuntime
    runner: SupervisedRunner
    counters: dict[str, int]

    @property
    def plugins(self) -> Mapping[str, PluginService]: ...
    @property
    def health(self) -> Mapping[str, PluginHealth]: ...
    @property
    def no_room(self) -> str: ...
    @property
    def troubles(self) -> Mapping[HostId, Sequence[Trouble]]: ...
    def hosts(self) -> Sequence[HostView]: ...


def measured(agent: MeasuredAgent) -> Measured:
    """All series of an agent but those of its HTTP."""
    found: dict[MetricSeries, float | Distribution] = {}
    for service in agent.plugins.values():
        found |= service.metrics()
    found |= agent.jobs.metrics()
    found |= agent.plugin_runtime.metrics()
    if isinstance(agent.env.starter, LooksAgain):
        found |= {metrics.STARTER.of(what): float(count) for what, count in agent.env.starter.counted.items()}
    links = agent.env.links
    if isinstance(links, CountedLinks):
        found |= links.metrics()
    devices = agent.env.probes.devices
    if isinstance(devices, CountedDevices):
        found |= metrics.DEVICES.of(devices.counters)
    found |= agent.gossip.metrics()
    found |= metrics.RPC.of({**agent.messenger.counters, **agent.counters})
    found |= metrics.RAFT.of(agent.log.counted)
    found |= agent.loop_lags.measured()
    return found | _state(agent)


def _state(agent: MeasuredAgent) -> dict[MetricSeries, float | Distribution]:
    """The present state of this host and of the log, and of hosts as gossip shows them."""
    found: dict[MetricSeries, float | Distribution] = {metrics.LEADER_TERM.of(): agent.log.term}
    found[metrics.HAS_LEADER.of()] = agent.log.leader is not None
    found[metrics.LEADS.of()] = agent.log.is_leader
    found[metrics.GOSSIP_KEYS.of()] = len(agent.keyring.keys)
    found[metrics.DISK_REFUSES.of()] = bool(agent.no_room)
    if (free := agent.runner.free_bytes) is not None:
        found[metrics.DISK_FREE_BYTES.of()] = free
    found[metrics.PLUGINS_FAILED.of()] = sum(health.state == "failed" for health in agent.health.values())
    states = Counter(view.state for view in agent.hosts())
    found |= {metrics.HOSTS.of(state): states[state] for state in STATES}
    found[metrics.HOSTS_WRONG.of()] = len(agent.troubles)
    found[metrics.HOSTS_ALIVE.of()] = states["alive"]
    found[metrics.TIME_SECONDS.of()] = agent.env.clock.wall_s()
    return found
