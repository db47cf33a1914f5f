"""Several rank processes on one GPU at once: NVIDIA's Multi-Process Service, started for a test and stopped after it.

Without it the GPU serves one process after the other, and ranks that wait for each other wait for time slices.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from types import TracebackType

from flexep.errors import Unavailable

CONTROL = "nvidia-cuda-mps-control"
SECONDS = 60.0


class Mps:
    """A daemon with directories of its own, so that it meets no other; a context manager.

    Attributes: `environment`: what a rank's process must be started with to be its client.
    """

    def __init__(self, ranks_a_gpu: int) -> None:
        """Every rank gets an equal part of its GPU's multiprocessors, so that the grids of all fit at once, and loads
        its kernels before it runs any: loading one may wait for a GPU on which peers wait for this rank."""
        self._folder = ""
        self._share = 100 // ranks_a_gpu

    @property
    def environment(self) -> dict[str, str]:
        return {
            **self._directories,
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(self._share),
            "CUDA_MODULE_LOADING": "EAGER",
        }

    @property
    def _directories(self) -> dict[str, str]:
        return {"CUDA_MPS_PIPE_DIRECTORY": self._folder, "CUDA_MPS_LOG_DIRECTORY": self._folder}

    def __enter__(self) -> Mps:
        """Raises Unavailable where the daemon is missing or does not start."""
        self._folder = tempfile.mkdtemp(prefix="flexep-mps-")
        try:
            ask_control(self._directories, "-d")
        except BaseException:
            shutil.rmtree(self._folder)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            ask_control(self._directories, said="quit\n")
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)


def ask_control(environment: Mapping[str, str], *arguments: str, said: str = "") -> str:
    """What the control program answers to a command on its standard input.

    Raises Unavailable where it is missing, takes too long or refuses; without a daemon it refuses all but "-d".
    """
    with tempfile.TemporaryFile("w+") as answer:  # no pipe, which a daemon would keep open
        try:
            done = subprocess.run(
                [CONTROL, *arguments], input=said, env={**os.environ, **environment}, stdout=answer,
                stderr=subprocess.STDOUT, text=True, timeout=SECONDS, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Unavailable(f"{CONTROL}: {error}") from error
        answer.seek(0)
        text = answer.read().strip()
    if done.returncode != 0:
        raise Unavailable(f"{CONTROL}: exit code {done.returncode}: {text}")
    return text
