"""How scoring on the CPU is cut in jobs, each done whole by one thread. It changes no bit of a result."""

from __future__ import annotations

import numpy as np

from .cpu_maxima import block_tokens
from .cpu_product import ROWS

JOB_TOKENS = 1 << 17  # document tokens of one job
JOB = 1 << 28  # floating point operations that are worth a job: 3 milliseconds, against 0.1 to prepare it
JOBS_PER_THREAD = 8  # at most, so that threads end together


def whole_rows(rows: int) -> int:
    """Query rows of a product that has room for so many."""
    return -(-rows // ROWS) * ROWS


def job_tokens(query_rows: int, width: int, length: np.ndarray, threads: int) -> int:
    """Document tokens of a job: as many jobs a thread as are worth one, up to JOBS_PER_THREAD."""
    total = int(length.sum())
    rounds = 2 * max(query_rows, ROWS) * width * total // (threads * JOB)
    share = total // (threads * min(max(rounds, 1), JOBS_PER_THREAD)) + int(length.max())
    return max(block_tokens(query_rows, width), min(share, JOB_TOKENS))


def ranges(length: np.ndarray, tokens: int, items: int) -> list[tuple[int, int]]:
    """Cuts items into ranges of at most `tokens` tokens (or one item) and `items` items."""
    total = length.cumsum()
    found, low = [], 0
    while low < len(length):
        before = int(total[low - 1]) if low else 0
        high = int(np.searchsorted(total, before + tokens, side="right"))
        high = min(max(high, low + 1), low + items)
        found.append((low, high))
        low = high
    return found
