"""Memory that `WriteBuffers` made. A class of its own, and of Python: what is compiled inherits from no `bytearray`."""


class WriteMemory(bytearray):
    is_spoiled = False
    """Somebody may still read it, whoever gives it back."""
