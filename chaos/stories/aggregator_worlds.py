"""No rack: aggregators that hold room for jobs of others, some for each seed (`chaos.crowds.reservations`)."""

from chaos.crowds import reservations
from chaos.story import Worlds

WORLDS: Worlds = ((reservations.play, 10),)
