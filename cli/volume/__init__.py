"""Volumes of remote memory: list, create and remove them; use one as swap or as an NBD device.

Without a command: `agentctl volume ls`. `agentctl slabs` shows on which hosts a volume's pages are, `agentctl memory`
how long requests take and what tenants may use, `agentctl why volume/NAME` what has happened to a volume."""
