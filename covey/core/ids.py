"""Ids of hosts and jobs, and which names are allowed."""

from typing import NewType

HostId = NewType("HostId", str)
"""The name of one machine, unique in the rack: `^[a-z0-9][a-z0-9.-]{0,62}$`."""

JobId = NewType("JobId", str)
"""The id of one job, given by the replicated log when the job is admitted to the queue: `j1`, `j2`, ..."""

ID_PATTERN = r"^[a-z0-9][a-z0-9.-]{0,62}\Z"
"""Pattern of the id of a host, tenant, volume or job; such an id is safe as a file name."""
