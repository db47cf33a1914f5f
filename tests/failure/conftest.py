"""Crews of ranks that may die."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.failure.ranks import Crew, Scenario
from tests.failure.scenarios import Setup


@pytest.fixture
def start() -> Iterator[Callable[..., Crew]]:
    """start(scenario, setup, *args) -> a crew of the setup's ranks."""
    with ExitStack() as crews:

        def start_crew(scenario: Scenario, setup: Setup, *args: object) -> Crew:
            return crews.enter_context(Crew(setup.ranks, scenario, setup, *args))

        yield start_crew
