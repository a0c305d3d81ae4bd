"""No rack: small racks of nothing but the replicated log, some for each seed (`chaos.crowds.log`)."""

from chaos.crowds.log import late
from chaos.crowds.log.play import run_seed
from chaos.story import Worlds

WORLDS: Worlds = ((run_seed, 10), (late.play, 1))
