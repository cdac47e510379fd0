"""Shared fixtures. Tests run on asyncio unless a folder says otherwise (tests/simulation: trio, virtual time)."""

import pytest


@pytest.fixture
def anyio_backend():
    return "asyncio"
