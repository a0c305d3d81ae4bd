"""`GET /v1/events`: the rack's lists as one stream, first whole, then what changes (`agent.api.streams.served`)."""
