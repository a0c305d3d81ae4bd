"""Which job runs, when and where: a thin elected leader over agents that own their GPUs (Tiresias, AntMan).

    submit -> log: Submitted -> leader: order, quota -> log: Granted(epoch, coordinator)
           -> coordinator: plan, Reserve to each host, all say yes -> log: Placed(places) = the start, on every host
           -> hosts: runner.start ... RanksEnded -> log: RanksReported -> all hosts said so: the job is over

Nothing here is decided in two places. The replicated log (`machine/log/queue.py`) owns quotas, order, grants and
attained service, and refuses what may never be: more than a quota, a stale epoch, one GPU for two gangs. The elected
leader (`machine/leader/leader.py`) only says which job may run now; it forgets nothing that matters when it dies. Which
GPUs a gang gets is agreed between the hosts that own them, asked by the job's coordinator (`machine/gang/gang.py`,
`machine/host/reservations.py`): whole or not at all. Each host then makes itself be what the log says
(`service/ranks/ranks.py`) and looks again every second, so it needs no message to be right after a restart.

A host that is cut off must not run what is placed again elsewhere, and cannot know that it is. So ranks run under
leases (`policy/leases.py`): their supervisor, which outlives the agent, ends them when no leader has confirmed them for
half of `host_lost_after_s`, and the leader takes a job back only when the last lease that it, or any leader before it,
may have given is certainly over (`machine/leader/leases.py`). A lease is long beside the restart of an agent or an
election, and short beside the time until a host counts as lost. What it costs is said in `service/leases.py`: ranks on
a host that reaches neither a leader nor a majority of voters end, since no host there can tell dead voters from a cut
wire. `--on-lost keep` decides the other way: such ranks keep running, and their job waits.

Without a leader everything that runs keeps running and every question is answered; only admissions and changes of
priority wait. Order is discretised two-dimensional attained service (`policy/order.py`): a job sinks as its GPUs times
seconds grow, so short jobs overtake long ones though no submitter says how long they are. Placement packs a gang onto
few hosts until its model has shown that it does not mind, and fills gaps then (`policy/place.py`). Every no and every
wait says why (`policy/explain.py`).

Jobs have classes (`policy/classes.py`). Guaranteed ones run within their tenant's quota, and the order of one tenant
never stops a job of another. Opportunistic ones use what is left and yield (`machine/leader/admission.py`). A job of
class auto that waits too long becomes opportunistic, and is upgraded where it runs once its tenant's quota has room. Of
gangs that are within their quota and do not fit yet, one at a time keeps the GPUs that are there.

What the agent decides is one of several published orders (`policy/rules.py`), and `covey-sim jobs` runs all of them
over a trace with the same walk, made incremental (`machine/leader/order_book.py`). With a history of ended jobs the
order can follow the Gittins index (`policy/history.py`). How skewed a model is comes from the tensors that its ranks
name, and the limit above which a gang is packed is fitted from what gangs lost (`machine/log/models.py`,
`policy/packing.py`). On GPUs that jobs share (`[scheduler] beside`) the same leader counts by GPU
(`machine/leader/shared_capacity.py`), hosts give out parts of GPUs by what they measured (`machine/host/parts.py`), and
ranks start when the host's sharing says so (`service/ranks/beside.py`). Opportunistic jobs yield nothing there but time
on the device.

Words: a *gang* is the workers of one job, started whole; a *grant* is the leave to run, fenced by its *epoch*; a
*coordinator* is the host that looks for a grant's GPUs; *attained service* is GPUs times seconds; a *place* is the part
of a gang on one host.
"""
