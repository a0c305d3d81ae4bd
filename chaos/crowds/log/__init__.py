"""Many small racks of nothing but the replicated log (`agent.consensus`), by seed."""
