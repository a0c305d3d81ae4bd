"""No rack: small racks of nothing but gossip, some for each seed (`chaos.crowds.gossip_swarm`)."""

from chaos.crowds import gossip_swarm
from chaos.story import Worlds

WORLDS: Worlds = ((gossip_swarm.play, 2),)
