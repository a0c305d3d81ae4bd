"""Real agents on hosts of their own: network, process, mount and host-name namespaces on this machine.

    switch      one namespace with a bridge per network; made by unshare, without root too where users may
    host        its own addresses, name, /etc/hosts, /etc/covey, /run/covey, /var/lib/covey, and process tree

So what documents tell people to type is run literally, and a host can be cut off, or lose its power, alone. `hosts.py`
makes the hosts, `booted.py` those whose first process is systemd, `faults.py` harms them, `pages.py` and `rank.py` are
what users do meanwhile, `storm.py` plays all of it.
"""
