"""No rack: whole logs whose clients read and write on every host, some for each seed (`chaos.crowds.log.clients`)."""

from chaos.crowds.log import clients
from chaos.story import Worlds

WORLDS: Worlds = ((clients.play, 1),)
