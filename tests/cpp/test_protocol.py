"""The handshake in the simulator and on threads: right under every schedule tried, and each planted bug is seen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cpp.compile import HERE, ROOT, NotCompiled, compile_program, copy_planted, run_program
from tests.cpp.protocol_plants import PLANTS, plant_all

CSRC = ROOT / "csrc"
SEEDS, MUTANT_SEEDS = 2000, 300
# Fibers jump between stacks, which a fortified longjmp takes for an error.
SIMULATOR_FLAGS = ("-O1", "-U_FORTIFY_SOURCE")


@dataclass(frozen=True)
class Row:
    """One line of the simulator's table."""

    scenario: str
    seeds: int
    failures: int
    stale_loads: int
    names: str


def simulate(
    program: Path, seeds: int, mutant: str = "none", scenario: str = "", plant: int = 0
) -> list[Row]:
    done = run_program(program, str(seeds), mutant, scenario, PLANTED=str(plant))
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    rows = [line.split(" | ") for line in done.stdout.splitlines()[1:]]
    return [Row(name, int(n), int(f), int(s), names) for name, n, f, s, names in rows]


@pytest.fixture(scope="module")
def simulator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("simulator") / "sim"
    return compile_program(program, [HERE / "protocol_sim.cpp"], CSRC, *SIMULATOR_FLAGS)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The simulator over a copy of the headers with all bugs of PLANTS, of which a run chooses one or none."""
    folder = tmp_path_factory.mktemp("planted")
    return compile_program(folder / "sim", [HERE / "protocol_sim.cpp"], plant_all(folder), *SIMULATOR_FLAGS)


def test_the_handshake_is_right_under_every_seed(simulator: Path) -> None:
    rows = simulate(simulator, SEEDS)
    assert len(rows) == 15
    for row in rows:
        assert (row.seeds, row.failures) == (SEEDS, 0), row
        assert row.stale_loads > SEEDS, f"the simulator is too kind to find anything: {row}"


@pytest.mark.parametrize(
    ("mutant", "scenario", "name"),
    [
        ("missing release", "records", "a record differs"),
        ("missing acquire", "pull", "a pulled row differs"),
        ("missing drain", "push", "a sum differs"),
        ("missing team sync", "push relay", "a sum differs"),
        ("missing release of a count", "push", "a sum differs"),
        ("missing acquire of a count", "pull", "a pulled row differs"),
    ],
)
def test_a_mem_or_team_that_breaks_its_promise_is_seen(
    mutant: str, scenario: str, name: str, simulator: Path
) -> None:
    (row,) = simulate(simulator, MUTANT_SEEDS, mutant, scenario)
    assert row.failures > 0, f"{mutant}: not seen in {scenario}"
    assert name in row.names


def test_the_planted_headers_are_right_when_none_is_chosen(planted: Path) -> None:
    assert all(row.failures == 0 for row in simulate(planted, 30))


@pytest.mark.parametrize("number", range(1, len(PLANTS) + 1), ids=[plant.name for plant in PLANTS])
def test_a_planted_bug_is_seen(number: int, planted: Path) -> None:
    plant = PLANTS[number - 1]
    (row,) = simulate(planted, MUTANT_SEEDS, scenario=plant.seen_in, plant=number)
    assert row.failures > 0, f"{plant.name}: not seen in {plant.seen_in}"
    assert plant.seen_as in row.names, f"{plant.name}: seen as {row.names}"


THREADS = [HERE / "protocol_threads.cpp", CSRC / "mem/host.cpp"]


@pytest.fixture(scope="module")
def threads_under_tsan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("tsan") / "threads"
    return compile_program(program, THREADS, CSRC, "-O1", "-g", "-fsanitize=thread")


def test_threads_are_clean_under_tsan(threads_under_tsan: Path) -> None:
    done = run_program(threads_under_tsan, "6", "none")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "push relay: 6 worlds" in done.stdout


@pytest.mark.parametrize("plant", ["missing release", "missing team sync", "missing release of a count"])
def test_tsan_reports_a_planted_race(plant: str, threads_under_tsan: Path) -> None:
    done = run_program(threads_under_tsan, "6", plant, TSAN_OPTIONS="halt_on_error=1")
    assert done.returncode == 66, done.stdout + done.stderr
    assert "data race" in done.stderr


def test_threads_are_clean_under_asan_and_ubsan(tmp_path: Path) -> None:
    flags = ("-O0", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    done = run_program(compile_program(tmp_path / "threads", THREADS, CSRC, *flags), "10", "none")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_layout_of_the_window_is_as_written_down(tmp_path: Path) -> None:
    golden = HERE / "window_golden.cpp"
    compile_program(tmp_path / "golden", [golden], CSRC, "-fsyntax-only")
    for right, wrong in LAYOUT_CHANGES:
        include = copy_planted(tmp_path / right[:5], "proto/window.h", right, wrong)
        with pytest.raises(NotCompiled, match="static assertion failed"):
            compile_program(tmp_path / "golden", [golden], include, "-fsyntax-only")


LAYOUT_CHANGES = [
    ("relays ? R * push_line_bytes() : 0", "relays ? D * push_line_bytes() : 0"),
    ("chunk % shape.slots) * shape.pull_tokens", "chunk) * shape.pull_tokens"),
    ("of.push.at += n * each.push", "of.push.at += 2 * n * each.push"),
    ("of.words[kind].at += n *", "of.words[kind].at += 0 * n *"),
    ("shape.landed_rows > 0 ? 0 : pull", "false ? 0 : pull"),
    ("(R - 1) * s.landed_rows", "R * s.landed_rows"),
    ("source < reader ? source : source - 1", "source"),
    ("(of_slice - slice) * shape", "of_slice * shape"),
]
