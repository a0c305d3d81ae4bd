"""The BLAS kernel with which this process computes: results are equal to the bit only between equal kernels.

OpenBLAS chooses its kernel by the processor it runs on (or OPENBLAS_CORETYPE), and another kernel adds in another
order. So two hosts with different processors, or a rank and a reference run in different environments, may differ in
the last bits although everything else is the same. A rank sends the kernel's name to the agent when it joins; `agentctl
job` says so when ranks of a job have different kernels.
"""

import ctypes
import sys

NAMES = (
    "scipy_openblas_get_corename64_",
    "scipy_openblas_get_corename",
    "openblas_get_corename64_",
    "openblas_get_corename",
)
"""Functions that return the kernel's name, by how the library was built: in numpy's wheels, in distributions."""
MAPS_BYTES_MAX = 4 << 20
"""Most bytes of /proc/self/maps that are read: a process with huge tensors has many lines there."""
LENGTH_MAX = 64


def kernel() -> str:
    """Name of the kernel, such as `numpy 2.1.0 OpenBLAS Haswell`; empty before numpy is imported (this function does
    not import it). Takes milliseconds."""
    numpy = sys.modules.get("numpy")
    version = getattr(numpy, "__version__", None)
    if version is None:
        return ""
    try:
        with open("/proc/self/maps", errors="replace") as maps:
            core = corename(maps.read(MAPS_BYTES_MAX))
    except OSError:
        core = ""
    return f"numpy {version} {core}".strip()[:LENGTH_MAX]


def corename(maps: str) -> str:
    """`OpenBLAS Haswell` for the first OpenBLAS that is loaded; empty when there is none or it does not say."""
    loaded = (line.split(maxsplit=5)[5] for line in maps.splitlines() if "openblas" in line and line.count(" ") > 4)
    for path in dict.fromkeys(loaded):
        try:
            library = ctypes.CDLL(path)  # loaded already: no second copy is loaded
        except OSError:
            continue
        for name in NAMES:
            if hasattr(library, name):
                ask = getattr(library, name)
                ask.restype, ask.argtypes = ctypes.c_char_p, []
                return f"OpenBLAS {(ask() or b'').decode('ascii', 'replace')}".strip()
    return ""
