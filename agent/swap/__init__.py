"""The host's swap helper (`covey-swapd`): the one process of Covey that may configure the kernel's NBD and swap.

A volume's process hands it the end of a socket pair; it gives that to the kernel and says which device it became. It
keeps nothing, listens to the agent's user alone, and touches no device but those whose backend begins with `covey:`.
"""
