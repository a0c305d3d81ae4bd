"""No rack: small racks of nothing but the replicated log, some for each seed (`chaos.crowds.log`).

Seeds that once broke: 51042 (a leader took the log that it heard last for the later one, and ignored a host's real
log), 300057 and 300165 (a voter that knew only how its log began took the new voters for strangers).
"""

from chaos.crowds.log import late
from chaos.crowds.log.play import run_seed
from chaos.story import Worlds

WORLDS: Worlds = ((run_seed, 10), (late.play, 1))
