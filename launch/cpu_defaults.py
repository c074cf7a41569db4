"""Environment that libraries read once, while torch is loaded: import this first. What is set already stays."""

from __future__ import annotations

import os

# The ranks of one machine take turns. Threads that spin while they wait steal the cores of whoever has the turn: a
# weight sync between two ranks on two cores takes twice as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Large tensors come in large pages, which saves a page fault for each 4 KiB of every new buffer.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
