"""The metrics of the plugin `sharing`."""

from covey.core.metrics import MetricGroup

METRICS = MetricGroup()
GPU_JOBS = METRICS.gauge("covey_gpu_jobs", "Jobs on each GPU of this host that jobs share.", "uuid")
GPU_MEMORY_FREE_BYTES = METRICS.gauge(
    "covey_gpu_memory_free_bytes", "Device memory of each GPU of this host that is promised to no job.", "uuid"
)
INTERFERENCE_RATIO = METRICS.gauge(
    "covey_interference_ratio",
    "How much slower a guaranteed job is beside others, as a share of its step alone.",
    "job_id",
    "uuid",
)
DEVICE_FAILURES = METRICS.counter(
    "covey_device_failures_total", "Looks at a GPU of this host that its driver did not answer."
)
SHARING = METRICS.counter("covey_sharing_total", "What the sharing of GPUs did on this host, by kind.", "kind")
