"""The rack's certificate authority: who asks an agent over TCP is the user whom a certificate of it names.

    the key of gossip  --HKDF-->  the authority's key  --signs-->  certificates of users: name and number, for days
                                                       --signs-->  certificates of hosts: names and addresses, in memory

The authority is made from the key that seals gossip, on every host alike. So it is where that key is, under the same
protection, and comes to a host that joins with it, over the same encrypted exchange; nothing else is kept or sent. A
rotation of keys is one of the authority: with `install` the new one is believed beside the old one, with `use` it
signs, with `remove` the old one and all that it signed are believed no more.

A user's certificate is made for whoever the kernel says asks at the unix socket (`agent.api.login`). It names the user,
and gives no right: what the user may do is judged by the host that is asked, as at its unix socket.
"""
