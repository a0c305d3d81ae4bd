"""Frames of `covey.wire.frames` over a driven connection: no task and no future for any of them."""

import asyncio
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import msgspec

from covey.ports.streams import ByteStream
from covey.wire.driven import DrivenStream, driven
from covey.wire.frames import FrameError, body_size, pack, unpack

T = TypeVar("T")
_HEADER_BYTES = 4


class FrameEnd(ABC, Generic[T]):
    """One end of a driven connection. Subclasses define `heard`."""

    def __init__(self, stream: ByteStream, decoder: msgspec.msgpack.Decoder[T]) -> None:
        self._stream: DrivenStream = driven(stream)
        self._decoder = decoder
        self._into = bytearray(_HEADER_BYTES)
        self._is_body = False
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once the connection has ended."""

    def start(self) -> None:
        self._stream.drive(self, polite=False)

    def say(self, message: msgspec.Struct) -> None:
        self._stream.send((pack(message),))

    @abstractmethod
    def heard(self, message: T) -> None:
        """A whole frame came."""

    def wanted(self) -> memoryview:
        return memoryview(self._into)

    def filled(self) -> None:
        try:
            if self._is_body:
                message = unpack(self._into, self._decoder)
                self._into, self._is_body = bytearray(_HEADER_BYTES), False
                self.heard(message)
                return
            size = body_size(self._into)
            if not size:
                raise FrameError("a frame without a body")
            self._into, self._is_body = bytearray(size), True
        except FrameError:
            self._into, self._is_body = bytearray(_HEADER_BYTES), False
            self._stream.close()

    def turn(self) -> None:
        """Called at the end of a turn; everything was sent already."""

    def ended(self, error: ConnectionError) -> None:
        if not self.over.done():
            self.over.set_result(None)
