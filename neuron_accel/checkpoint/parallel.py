"""Moving bytes with several threads: one of them moves bytes more slowly than memory does, and than most disks do."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from neuron_accel.engine.run import Run

Item = TypeVar("Item")
Result = TypeVar("Result")

_MOST = 4  # more do not make it faster, and there are other ranks


def threads_of(run: Run) -> int:
    """How many threads a rank may move bytes with, such that those of all ranks on its machine have a core each."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", run.world.size))
    return max(1, min(_MOST, len(os.sched_getaffinity(0)) // max(1, ranks)))


def in_order(work: Callable[[Item], Result], items: Iterable[Item], threads: int) -> Iterator[tuple[Item, Result]]:
    """Every item with ``work(item)``, in the order of the items; a few of them are worked on ahead.

    Raises:
        Whatever ``work`` raises, for the first item for which it does.
    """
    if threads == 1:
        for item in items:
            yield item, work(item)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="neuron_accel-read") as pool:
        ahead: deque[tuple[Item, Future[Result]]] = deque()
        try:
            for item in items:
                ahead.append((item, pool.submit(work, item)))
                if len(ahead) > 2 * threads:
                    first, result = ahead.popleft()
                    yield first, result.result()
            while ahead:
                first, result = ahead.popleft()
                yield first, result.result()
        finally:
            for _, waiting in ahead:
                waiting.cancel()
