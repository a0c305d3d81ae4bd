"""The spill log: pages of a volume on this host's disk, behind its lenders and instead of them."""
