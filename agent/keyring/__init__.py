"""The keys of gossip while the rack runs: a new one is installed on every host, then seals, then the old one goes."""
