"""The plugin `scheduler`, as the agent starts it."""

from plugins.base import Plugin
from plugins.scheduler.messages.wire import Talk
from plugins.scheduler.policy.settings import SchedulerSettings
from plugins.scheduler.service.main import SchedulerService
from plugins.scheduler.service.metrics import METRICS

PLUGIN = Plugin(
    name="scheduler",
    paper="Gu et al., Tiresias: A GPU Cluster Manager for Distributed Deep Learning, NSDI 2019 "
    "(quota and job classes: Xiao et al., AntMan, OSDI 2020)",
    settings=SchedulerSettings,
    messages=Talk,
    service=SchedulerService,
    metrics=METRICS,
)
