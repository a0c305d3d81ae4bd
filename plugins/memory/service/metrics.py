"""Metrics of the plugin `memory`."""

from covey.core.metrics import MetricGroup

METRICS = MetricGroup()
HEADROOM_BYTES = METRICS.gauge("covey_headroom_bytes", "Memory this host keeps free for itself.")
LINKS = METRICS.gauge("covey_memory_links", "Slabs of volumes at lenders, by the state of their links.", "state")
PAGES_REFUSED = METRICS.counter("covey_memory_pages_refused_total", "Pages from lenders that failed authentication.")
TENANT_BYTES = METRICS.gauge(
    "covey_memory_tenant_bytes",
    "Remote memory of each tenant: its volumes on this host, and what this host lends to it.",
    "tenant",
    "role",
)
RACK_BYTES = METRICS.gauge(
    "covey_memory_rack_bytes",
    "Remote memory that the rack lends to each tenant and job, as this host hears it.",
    "tenant",
    "job_id",
)
BUDGET_BYTES = METRICS.gauge(
    "covey_memory_budget_bytes",
    "Most remote memory that a tenant or a job may have, over the whole rack.",
    "tenant",
    "job_id",
)
BUDGET_REFUSED = METRICS.counter(
    "covey_memory_budget_refused_total", "Volumes (borrower) and slabs (lender) refused for a budget.", "by"
)
READ_SECONDS = METRICS.histogram(
    "covey_memory_read_seconds", "How long reads of this host's volumes took, by who answered.", "answered"
)
WRITE_SECONDS = METRICS.histogram(
    "covey_memory_write_seconds", "How long writes of this host's volumes took, by who answered.", "answered"
)
PAGE_BYTES = METRICS.counter(
    "covey_page_bytes_total", "Bytes of volumes' pages read and written, by where they came from.", "op", "from"
)
PAGE_QUEUE_PAGES = METRICS.gauge("covey_page_queue_pages", "Pages that wait to be written to disk.")
STALLS = METRICS.counter(
    "covey_memory_stalls_total", "Times that the loop of slabd or of a vold stalled for more than 5 ms.", "process"
)
STALL_LONGEST_SECONDS = METRICS.gauge(
    "covey_memory_stall_longest_seconds",
    "Longest stall of a loop of slabd, or of a vold, in the last minute or two.",
    "process",
)
PROCESSOR_WAITS = METRICS.counter(
    "covey_memory_processor_waits_total",
    "Times that slabd, or a vold, waited for a processor for more than 5 ms.",
    "process",
)
PROCESSOR_WAIT_LONGEST_SECONDS = METRICS.gauge(
    "covey_memory_processor_wait_longest_seconds",
    "Longest wait of slabd, or of a vold, for a processor in the last minute or two.",
    "process",
)
PAGES_TORN = METRICS.counter("covey_pages_torn_total", "Pages whose checksum was wrong when they were read.")
SLAB_QUEUE_PAIRS = METRICS.gauge(
    "covey_slab_queue_pairs", "Volumes of other hosts that reach this host's slabs over RDMA."
)
VOLUME_MAPPED_SLABS = METRICS.gauge("covey_volume_mapped_slabs", "Borrowed slabs of this host whose memory is mapped.")
VOLUME_ONE_SIDED_SLABS = METRICS.gauge("covey_volume_one_sided_slabs", "Borrowed slabs whose pages go over RDMA.")
VOLUME_QUEUE_PAIRS_FAILED = METRICS.counter(
    "covey_volume_queue_pairs_failed_total", "Links to lenders that ended because their queue pair failed."
)
SLAB_CONNECTIONS_REFUSED = METRICS.counter("covey_slab_connections_refused_total", "Connections that slabd refused.")
SLAB_EVICTIONS = METRICS.counter("covey_slab_evictions_total", "Slabs taken back from their borrowers.", "reason")
SLAB_LENT_BYTES = METRICS.gauge("covey_slab_lent_bytes", "Bytes of slabs lent to others.")
SLAB_LINKS_REOPENED = METRICS.counter(
    "covey_slab_links_reopened_total", "Links to lenders that ended and were opened again."
)
SLAB_UNLOCKED_BYTES = METRICS.gauge("covey_slab_unlocked_bytes", "Bytes of lent slabs that may be swapped out.")
SLAB_TOUCHED_BYTES = METRICS.gauge("covey_slab_touched_bytes", "Bytes of lent slabs that hold pages.")
SLABS = METRICS.gauge(
    "covey_slabs", "Slabs this host lends, borrows over a working link, has on disk, or waits for.", "role"
)
SLABS_UNRECOVERED = METRICS.counter(
    "covey_slabs_unrecovered_total", "Slabs lost at a restart: their lender had lost them, or was given up."
)
SPARE_BYTES = METRICS.gauge("covey_spare_bytes", "Memory above headroom, which may be lent.")
VOLUMES = METRICS.gauge("covey_volumes", "Volumes of remote memory of this host.")
VOLUMES_IN_TROUBLE = METRICS.gauge("covey_volumes_in_trouble", "Volumes whose disk refuses pages now.")
