"""Hands the compiled module to CMake; everything else about the package is in pyproject.toml.

`CMAKE_ARGS` adds configure options, for example CMAKE_ARGS=-DFLEXEP_CUDA=OFF.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


class CMakeBuild(build_ext):
    """Builds flexep._C with CMake and Ninja: in place for development, else into the wheel's tree."""

    def run(self) -> None:
        if self.inplace or self.editable_mode:
            build, output = ROOT / "build", ROOT / "python" / "flexep"
        else:
            build, output = Path(self.build_temp).resolve(), Path(self.build_lib).resolve() / "flexep"
        ninja = shutil.which("ninja")
        configure = ["cmake", "-S", ROOT, "-B", build, "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}"]
        configure += [f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
        configure += [f"-DFLEXEP_OUTPUT_DIR={output}", *shlex.split(os.environ.get("CMAKE_ARGS", ""))]
        subprocess.run(configure, check=True)
        subprocess.run(["cmake", "--build", build, "--parallel", str(os.cpu_count() or 1)], check=True)


setup(ext_modules=[Extension("flexep._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
