"""An emulated machine of Debian packages, for what the kernel at hand does not have: RDMA over SoftRoCE.

`image` makes it once and keeps it in `.guest/`; `boot` runs commands in it; `main` is `python -m chaos.guest.main`.
Nothing of it is measured for speed: qemu translates every instruction (TCG).

Tried instead: `virtme-ng` boots Debian's kernel on this machine's own root, with SoftRoCE, in a minute without an
image (`vng --disable-kvm -r vmlinuz`). It could replace `image`, `initrd` and `boot`, but only on hosts of Debian 12,
whose python3-pyverbs the tests need: the guest brings its own. `mkosi` makes images, which is a hundred lines of
`image`, and needs a newer version than Debian 12 has. Neither replaces User-Mode Linux (`uml`, `swap`), in which a
kernel swaps at the speed of this machine and not of an emulated one.
"""
