"""Fixtures for running these tests with the byte path as machine code (`make compiled`), whose objects keep their
methods."""

import os
from collections.abc import Generator
from typing import Any

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    try:
        return (yield)
    except AttributeError as error:
        if os.environ.get("COVEY_COMPILED") and "is read-only" in str(error):
            pytest.skip("it replaces a method of a compiled object")
        raise
