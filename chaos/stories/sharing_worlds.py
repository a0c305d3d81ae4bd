"""No rack: gangs that are to be upgraded, some for each seed (`chaos.crowds.upgrades`)."""

from chaos.crowds import upgrades
from chaos.story import Worlds

WORLDS: Worlds = ((upgrades.play, 10),)
