"""Crews of ranks that may die."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.failure.ranks import Crew, Scenario
from tests.failure.scenarios import R


@pytest.fixture
def start() -> Iterator[Callable[..., Crew]]:
    """start(scenario, *args) -> a crew of R ranks."""
    with ExitStack() as crews:

        def start_crew(scenario: Scenario, *args: object) -> Crew:
            return crews.enter_context(Crew(R, scenario, *args))

        yield start_crew
