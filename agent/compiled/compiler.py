"""The compiler's own process, a script: `compiler.py WORK CIPHER FILE...` in WORK, a folder that is its own.

A guard, forked first, waits for the process that started it. When that is gone without a word, killed perhaps, the
guard kills this process's group, whatever compilers there are in it, and removes WORK.
"""

import os
import shlex
import shutil
import signal
import sys
import sysconfig

RUN_PATH = "-Wl,-rpath"
"""Beginning of the words by which a linker is told where libraries lie at run time."""


def guard(work: str) -> None:
    """Fork the guard of this process, which leads its group."""
    group = os.getpid()
    if os.fork():
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        return
    os.setsid()  # out of the group that it may have to kill
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    if not os.read(0, 1):
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            pass
        shutil.rmtree(work, ignore_errors=True)
    os._exit(0)


def linker(link: str, compiler: str = "") -> str:
    """How Python links its modules (`LDSHARED`), without the folders of the machine that builds: what is made here may
    run elsewhere, where others could own them. `compiler`: takes the place of the one in it."""
    first, *words = shlex.split(link)
    return shlex.join([*(shlex.split(compiler) or [first]), *(word for word in words if not word.startswith(RUN_PATH))])


def main(work: str, cipher: str, files: list[str]) -> None:
    guard(work)
    link = str(sysconfig.get_config_var("LDSHARED") or "cc -shared")
    os.environ.setdefault("LDSHARED", linker(link, os.environ.get("CC", "")))
    from mypyc.build import mypycify
    from setuptools import Extension, setup  # type: ignore[import-untyped]  # its stubs are a package of their own

    modules = mypycify(["--config-file=mypy.ini", *files], opt_level="2", debug_level="0")
    modules.append(Extension(cipher, [cipher.replace(".", "/") + ".c"], extra_compile_args=["-O2"], libraries=["dl"]))
    setup(
        name="covey-compiled", packages=[], ext_modules=modules,
        script_args=["-q", "build_ext", "--build-lib", f"{work}/out", "--build-temp", f"{work}/temp"],
    )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
