"""Load: every host says by gossip how busy it is, and any host can name the calmest one.

Not a published system, but a small and whole plugin: `docs/start/plugin.md` builds it in an hour. A host measures its
load once a second and smooths it. It gossips the smoothed value when it has moved by a step, so that a quiet rack says
nothing. Gossip is a hint with an age: a host that wants the calmest one asks the two that look calmest, live, and
takes the calmer one that answers.

    probes -> service -> machine -> ShowLoad -> gossip -> every other host
    agentctl -> service -> calmest_by_hint -> HowBusy to two hosts -> BusyNow -> the calmer one

Words. *load*: the busier of GPUs and memory, 0..1. *busy*: above `busy_above`, until it is below `calm_below` again.

    messages   the question, its answer, and what is gossiped      policy    what load is, who looks calmest
    machine    smoothed load, when to show it, busy or calm        service   probes, gossip, the command, metrics
"""
