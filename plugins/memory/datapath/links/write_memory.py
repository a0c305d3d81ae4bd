"""Memory that `WriteBuffers` made. A class of its own, in Python: a compiled class cannot inherit from `bytearray`."""


class WriteMemory(bytearray):
    is_spoiled = False
    """The memory may still be read by a sender, even after it is given back."""
