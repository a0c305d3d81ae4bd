"""Many small racks of nothing but the replicated log (`agent.raft`), by seed."""
