"""The byte path of remote memory, compiled: its Python sources made into machine code by mypyc, and the sealing of
pages in C (`page_cipher.c`).

    a wheel built by `make dist`     carries it: `agent/compiled/built/DIGEST.ABI/`
    python -m agent.compiled         compiles it for this installation: `lib/covey-compiled/DIGEST.ABI/` of its prefix
    a checkout, or a pure wheel      is interpreted; every promise holds all the same

A folder is named after the sources, the Python's ABI and the machine, so that nothing is ever loaded that was made from
other sources, and is not used when another user could have written it. `files` finds it and says why it is not used,
`build` makes it. What it is worth: `docs/results/memory.md`.
"""
