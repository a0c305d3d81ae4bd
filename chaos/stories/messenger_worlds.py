"""No rack: agents that are nothing but a messenger, some for each seed (`chaos.crowds.messengers`)."""

from chaos.crowds import messengers
from chaos.story import Worlds

WORLDS: Worlds = ((messengers.play, 2),)
