"""What pyproject.toml cannot say: a wheel of `covey-agent` that carries the byte path compiled.

COVEY_WHEEL=compiled pip wheel .       for this Python and this machine (a C compiler; a minute or two)
pip wheel .                            a pure wheel, for every Python: its byte path is interpreted
"""

import os
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

IS_COMPILED = os.environ.get("COVEY_WHEEL") == "compiled"


class CarryingBuild(build_py):
    """Compiles from the packages that were copied, into them; not for an editable installation."""

    def run(self) -> None:
        super().run()
        if IS_COMPILED and not self.editable_mode:
            sys.path.insert(0, str(Path(__file__).parent))
            from agent.compiled.build import NotCompiled, carry

            try:
                print(f"compiled into {carry(Path(self.build_lib)).name}")
            except NotCompiled as why:
                sys.exit(f"the byte path was not compiled: {why}")


class CarryingDistribution(Distribution):
    """With machine code in it a wheel is for one Python and one machine."""

    def has_ext_modules(self) -> bool:
        return IS_COMPILED or super().has_ext_modules()


setup(
    cmdclass={"build_py": CarryingBuild},
    distclass=CarryingDistribution,
    setup_requires=["mypy>=1.14"] if IS_COMPILED else [],
)
