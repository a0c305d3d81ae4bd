"""Answers to questions of other agents.

An answer that does not fit into one envelope is kept for `KEPT_S`, and the asker fetches it page by page; one that is
longer than all pages together is refused. A question that arrives again while its answer is computed is not answered
twice. An asker has at most `AT_ONCE_MAX` questions under way, and an answer takes at most `ANSWER_S_MAX`: a plugin that
never returns uses up the limit of one asker only.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable

from agent.rpc.envelope import ANSWER_BYTES_MAX, PAGE_BYTES, Envelope, Kind, RefusedBody, encode
from covey.core.errors import Refused
from covey.core.ids import HostId
from covey.ports.env import Env

ANSWER_S_MAX = 30.0
"""The most seconds that an answer may take; the longest that is waited for is 10 s
(`plugins.aggregator.machine.profiler`)."""
AT_ONCE_MAX = 256
"""The most questions of one asker that are answered at a time."""
KEPT_S = 10.0
"""Seconds for which pages wait to be fetched."""
KEPT_BYTES_MAX = 64 << 20
"""The most bytes of all kept answers together; the oldest are dropped first."""

Question = tuple[HostId, int, int]
"""A question: asker, its boot, and the id it gave."""
WORDS_MAX = 1000
"""The most characters of each line of a refusal."""


class Answers:
    """Answers questions: `answer(sender, plugin, body) -> bytes` answers, or raises Refused."""

    def __init__(
        self,
        env: Env,
        answer: Callable[[HostId, str, bytes], Awaitable[bytes]],
        post: Callable[[HostId, Envelope], bool],
        counters: Counter[str],
    ) -> None:
        self._env, self._answer, self._post, self._counters = env, answer, post, counters
        self._at_work: dict[HostId, set[Question]] = {}
        self._kept: OrderedDict[Question, tuple[float, bytes]] = OrderedDict()
        """The long answers that are kept, and when they were made, oldest first."""
        self._kept_bytes = 0

    def asked(self, sender: HostId, envelope: Envelope) -> None:
        question = (sender, envelope.boot, envelope.id)
        at_work = self._at_work.setdefault(sender, set())
        if envelope.page:
            self._turn_to(sender, envelope, question)
        elif question in at_work:
            self._counters["asked_again"] += 1
        elif len(at_work) >= AT_ONCE_MAX:
            self._counters["questions_refused"] += 1
            why = f"{AT_ONCE_MAX} of them, the limit, are being answered"
            what = f"{self._env.host} has too many requests from {sender}"
            self._refuse(sender, envelope, Refused(75, what, why, "ask again later"))
        else:
            at_work.add(question)
            self._env.spawn("answer", self._work(sender, envelope, question))

    async def _work(self, sender: HostId, envelope: Envelope, question: Question) -> None:
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                body = await self._answer(sender, envelope.plugin, envelope.body)
            self._check_length(body)
        except Refused as no:
            self._refuse(sender, envelope, no)
        except TimeoutError:
            self._counters["answers_late"] += 1
            why = f"it took longer than {ANSWER_S_MAX:g} s"
            self._refuse(sender, envelope, Refused(1, f"{self._env.host} gave no answer", why, "see its agent's log"))
        except Exception as error:
            # A question of another host must not end this agent; the exception is a defect, so its traceback is logged.
            self._counters["answers_failed"] += 1
            self._env.log.error("question not answered", sender=sender, plugin=envelope.plugin, exc_info=error)
            self._refuse(sender, envelope, Refused(1, f"{self._env.host} failed to answer", repr(error), "see its log"))
        else:
            if len(body) > PAGE_BYTES:
                self._keep(question, body)
            self._page(sender, envelope, body)
        finally:
            self._at_work[sender].discard(question)

    def _check_length(self, body: bytes) -> None:
        if len(body) > ANSWER_BYTES_MAX:
            self._counters["answers_too_long"] += 1
            why = f"it has {len(body)} bytes, and the limit is {ANSWER_BYTES_MAX}"
            raise Refused(1, f"the answer of {self._env.host} is too long", why, f"ask the agent of {self._env.host}")

    # ---- pages ----

    def _keep(self, question: Question, body: bytes) -> None:
        self._drop(question)
        self._kept[question] = (self._env.clock.now_s(), body)
        self._kept_bytes += len(body)
        while self._kept_bytes > KEPT_BYTES_MAX:
            self._drop(next(iter(self._kept)))
        asyncio.get_running_loop().call_later(KEPT_S, self._drop_old)

    def _drop(self, question: Question) -> None:
        _, body = self._kept.pop(question, (0.0, b""))
        self._kept_bytes -= len(body)

    def _drop_old(self) -> None:
        before_s = self._env.clock.now_s() - KEPT_S
        for question in [question for question, (at_s, _) in self._kept.items() if at_s <= before_s]:
            self._drop(question)

    def _turn_to(self, sender: HostId, envelope: Envelope, question: Question) -> None:
        known = self._kept.get(question)
        if known is None or envelope.page * PAGE_BYTES >= len(known[1]):
            self._counters["pages_not_kept"] += 1
            gone = Refused(75, "the rest of the answer is gone", "the rest was not fetched in time", "ask again")
            self._refuse(sender, envelope, gone)
            return
        self._page(sender, envelope, known[1])

    def _page(self, sender: HostId, envelope: Envelope, body: bytes) -> None:
        pages = max(1, -(-len(body) // PAGE_BYTES))
        part = body[envelope.page * PAGE_BYTES : (envelope.page + 1) * PAGE_BYTES]
        self._reply("answer", sender, envelope, part, pages)

    def _refuse(self, sender: HostId, envelope: Envelope, no: Refused) -> None:
        body = RefusedBody(no.code, no.what[:WORDS_MAX], no.why[:WORDS_MAX], no.next[:WORDS_MAX])
        self._reply("refused", sender, envelope, encode(body))

    def _reply(self, kind: Kind, sender: HostId, envelope: Envelope, body: bytes, pages: int = 1) -> None:
        self._post(
            sender, Envelope(kind, envelope.id, envelope.boot, 0, 0, envelope.plugin, body, envelope.page, pages)
        )
