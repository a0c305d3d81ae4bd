"""An emulated machine of Debian packages, for what the kernel at hand does not have: RDMA over SoftRoCE.

`image` makes it once and keeps it in `.guest/`; `boot` runs commands in it; `main` is `python -m chaos.guest.main`.
Nothing of it is measured for speed: qemu translates every instruction (TCG).
"""
