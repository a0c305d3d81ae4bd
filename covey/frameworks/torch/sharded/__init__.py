"""Models that are divided among ranks (FSDP): their state by shards, in checkpoints and on replicas."""
