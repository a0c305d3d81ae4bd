"""The connection of the earlier owner, at the next owner of a job (`block_copies`)."""

import asyncio

from covey.ports.streams import ByteStream
from covey.tensors.numbers.tensor_wire import HEADER_BYTES, OWNER, TensorOp, TensorWireError, frame, parse, verify
from covey.tensors.owner.speakers import Violation
from plugins.aggregator.datapath.blocks.block_copies import IncomingCopies
from plugins.aggregator.datapath.blocks.state_carrier import COPY_SILENT_S
from plugins.aggregator.datapath.job_sums import JobSums


class OwnerLink:
    """The connection after its hello was accepted. A job has one at a time."""

    def __init__(self, job: JobSums, stream: ByteStream) -> None:
        self.job, self._stream = job, stream
        self._copies = job.before = IncomingCopies(job)

    async def read_in(self) -> None:
        """Read frames until the connection ends, always by an exception. TensorWireError: it was the fault of the
        earlier owner; TimeoutError when that is silent."""
        head, job = bytearray(HEADER_BYTES), self.job
        await self._stream.write(*frame(TensorOp.WELCOME, job.hash, job.epoch, rank=OWNER))
        while True:
            async with asyncio.timeout(COPY_SILENT_S):
                await self._stream.read_into(memoryview(head))
                header = parse(head)
                if (header.job, header.epoch, header.rank) != (job.hash, job.epoch, OWNER):
                    raise TensorWireError("a frame for another job or epoch than this connection was opened for")
                self._raise_if_over()
                into = self._copies.destination(header)
                await self._stream.read_into(into)
            began_s = job.env.clock.cpu_s()
            verify(head, into)
            self._raise_if_over()
            answers = self._copies.heard(header, into)
            job.worked(began_s)
            job.carried(header.length)
            for said in answers:
                await self._stream.write(*said)

    def _raise_if_over(self) -> None:
        if self.job.over:
            raise ConnectionAbortedError("no longer served here")

    async def blame(self, why: str) -> None:
        """Nothing is sent: the earlier owner hears of its fault by the end of its connection."""

    def leave(self) -> None:
        """The connection ended: ask ranks for what did not come."""
        self.job.before = None
        job, copies = self.job, self._copies
        failed = copies.announces or bool(copies.awaited)
        job.counters.copied += copies.copied
        job.counters.copies_failed += failed
        figures = {"copied": copies.copied, "received_bytes": copies.received_bytes, "missing": copies.awaited}
        job.env.log.info("state came", job=job.job, **figures)
        try:
            copies.ended()
        except Violation as error:
            job.env.log.warning("ranks report impossible versions", job=job.job, why=str(error))

    def close(self) -> None:
        self._stream.close()
