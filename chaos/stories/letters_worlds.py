"""No rack: agents that are nothing but a messenger, some for each seed (`chaos.crowds.letters`)."""

from chaos.crowds import letters
from chaos.story import Worlds

WORLDS: Worlds = ((letters.play, 2),)
