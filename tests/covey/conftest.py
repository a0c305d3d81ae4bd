"""An agent's socket, and processes that have imported PyTorch, for tests of the job side."""

import tempfile
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.agent.here import here
from tests.covey.agents import Agent
from tests.covey.forks import Forks


@pytest.fixture
async def agent() -> AsyncIterator[Agent]:
    with tempfile.TemporaryDirectory(prefix="covey-") as directory:
        async with here(directory) as host:
            found = Agent(host)
            await found.socket.start()
            yield found
            await found.socket.stop()


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    made = Forks()
    yield made
    made.close()
