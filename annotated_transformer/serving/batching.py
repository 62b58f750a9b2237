"""One thread owns the model: it translates in batches what arrives together."""

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeAlias

from annotated_transformer.engine.system import System
from annotated_transformer.fast.decoding import keep_decoder_weights
from annotated_transformer.fast.products import return_memory
from annotated_transformer.fast.search import beam_search
from annotated_transformer.serving.attention import attention_json
from annotated_transformer.serving.requests import Limits, Refusal, shutdown_refusal
from annotated_transformer.translation.beam_search import Hypothesis

TRIM = 1.0  # seconds after which memory is returned to the system
Found: TypeAlias = tuple[Hypothesis, bytes]  # and its attention, as JSON; empty if not wanted


@dataclass(eq=False)
class Job:
    """A sentence to translate."""

    tokens: list[int]  #: Source tokens, without special symbols.
    beam: int = 1  #: Beam size.
    alpha: float = 0.6  #: Length penalty.
    shown: bool = False  #: Whether its attention is wanted; such a sentence is a batch of its own.
    #: The result. A job that is cancelled before its batch begins is dropped.
    found: Future[Found] = field(default_factory=Future)
    #: When it arrived, in seconds on the monotonic clock.
    arrived: float = field(default_factory=time.monotonic)

    def can_batch_with(self, other: "Job") -> bool:
        """Whether both can be in one batch."""
        same = (self.beam, self.alpha) == (other.beam, other.alpha)
        return same and not self.shown and not other.shown


class Batcher:
    """A queue of sentences, and the thread that translates them.

    The system is in evaluation mode, and nothing else may use it.
    """

    def __init__(self, system: System, limits: Limits) -> None:
        self.system, self.limits = system, limits
        self.queue: deque[Job] = deque()
        self.changed = threading.Condition()
        self.closed = False
        self.thread = threading.Thread(target=self._work, name="model", daemon=True)
        self.thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue sentences, all or none.

        Raises:
            Refusal: Too many are waiting.
        """
        with self.changed:
            if len(self.queue) + len(jobs) > self.limits.queue:
                self.queue = deque(job for job in self.queue if not job.found.cancelled())
            if self.closed:
                raise shutdown_refusal()
            if len(self.queue) + len(jobs) > self.limits.queue:
                much = "too many sentences are waiting; try again later"
                raise Refusal(503, much, retry_after="1")
            self.queue.extend(jobs)
            self.changed.notify()

    def stop(self) -> None:
        """Refuse what waits, and let the thread end after its batch."""
        with self.changed:
            self.closed = True
            for job in self.queue:
                if job.found.set_running_or_notify_cancel():
                    job.found.set_exception(shutdown_refusal())
            self.queue.clear()
            self.changed.notify()

    def _work(self) -> None:
        """Translate batch after batch."""
        trimmed = time.monotonic()
        with keep_decoder_weights(self.system.model, self.system.precision):
            while batch := self._next_batch():
                try:
                    results = self._translate(batch)
                except Exception as error:  # of one batch; the next may do better
                    for job in batch:
                        job.found.set_exception(error)
                else:
                    for job, found in zip(batch, results, strict=True):
                        job.found.set_result(found)
                if time.monotonic() - trimmed > TRIM:
                    return_memory()
                    trimmed = time.monotonic()

    def _next_batch(self) -> list[Job]:
        """Wait for sentences, and take what is translated together; empty at the end."""
        with self.changed:
            while True:
                self.changed.wait_for(lambda: self.queue or self.closed)
                if self.closed:
                    return []
                due = self.queue[0].arrived + self.limits.wait
                while (left := due - time.monotonic()) > 0 and not self.closed:
                    if not self.queue or len(self._split()[0]) < len(self.queue):
                        break  # waiting longer cannot make the batch larger
                    self.changed.wait(left)
                taken, self.queue = self._split()
                if running := [job for job in taken if job.found.set_running_or_notify_cancel()]:
                    return running

    def _split(self) -> tuple[list[Job], deque[Job]]:
        """Return the next batch, and what stays, both in the order of arrival."""
        taken: list[Job] = []
        left: deque[Job] = deque()
        longest = 0
        for job in self.queue:
            if job.found.cancelled():
                continue
            longer = max(longest, len(job.tokens) + 1)
            size = (len(taken) + 1) * longer * job.beam
            if not taken or (taken[0].can_batch_with(job) and size <= self.limits.tokens):
                taken.append(job)
                longest = longer
            else:
                left.append(job)
        return taken, left

    def _translate(self, batch: list[Job]) -> list[Found]:
        """Translate a batch; every sentence's result is that of the sentence alone."""
        first, limit = batch[0], self.system.config.max_len - 1
        sources, beam, alpha = [job.tokens for job in batch], first.beam, first.alpha
        found = beam_search(self.system.model, sources, beam=beam, alpha=alpha, max_len=limit)
        if not first.shown:
            return [(best, b"") for (best,) in found]
        ((best,),) = found
        return [(best, attention_json(self.system, first.tokens, best, self.limits.shown))]
