"""An agent's socket, for tests of the job side."""

import tempfile
from collections.abc import AsyncIterator

import pytest

from tests.agent.here import here
from tests.covey.agents import Agent


@pytest.fixture
async def agent() -> AsyncIterator[Agent]:
    with tempfile.TemporaryDirectory(prefix="covey-") as directory:
        async with here(directory) as host:
            found = Agent(host)
            await found.socket.start()
            yield found
            await found.socket.stop()
