"""The bench `update`: what layouts and chunked log-probs save, on SmolLM2-135M in one thread on a CPU.

Every comparison is one of two ways to the same numbers, measured in turns.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from rayless.comm.experience import Experience
from rayless.launch.config import find_path
from rayless.trainers.logprobs import LogProbModel, head_log_probs, log_probs_and_entropy
from rayless.trainers.model_config import ModelConfig
from rayless.trainers.packing import Layout, MicroBatch, cheapest_layout, micro_batches

ROUNDS = 3
MAX_TOKENS = 16384
HIDDEN, VOCABULARY, TOKENS = 576, 49152, 4096


def bench_update() -> dict[str, Any]:
    """One line of figures: speed-ups over the padded layout, and the log-prob pass's share of the naive one's memory.

    `shared_P_C_G`: a prompt of P tokens, G completions of C. `packed_L_H`: lengths drawn between L and H. `auto_P_C_G`:
    what `auto` picks there. Medians of 3, forward and backward; `gap` is the largest difference of a log-prob.
    """
    from rayless.trainers.policy import load_model

    torch.set_num_threads(1)
    memory = log_prob_memory()  # first: later a peak may lie behind
    model = ModelConfig(path=find_path("models/smollm2", "model"))
    torch.backends.cuda.enable_flash_sdp(False)  # as the trainers do on a CPU
    scorer = LogProbModel(load_model(model, torch.device("cpu"), torch.float32))
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(8, 129, (16,), generator=generator).tolist()
    settings: dict[str, tuple[Experience, Layout | None]] = {
        "shared_56_22_8": (experience_of(56, [22] * 8, group_size=8), "shared_prefix"),
        "shared_200_20_16": (experience_of(200, [20] * 16, group_size=16), "shared_prefix"),
        "packed_8_128": (experience_of(1, [length - 1 for length in drawn], group_size=1), "packed"),
        "auto_16_512_4": (experience_of(16, [512] * 4, group_size=4), None),
    }
    speedup, gaps = {}, []
    for name, (experience, layout) in settings.items():
        groups = [(experience.groups == group).nonzero()[:, 0] for group in experience.groups.unique()]
        chosen = layout or cheapest_layout(experience, groups, max_tokens=MAX_TOKENS, hidden_size=HIDDEN)
        speedup[name], gap = _compare(scorer, experience, groups, chosen)
        gaps.append(gap)
    return {"bench": "update", "threads": 1, "speedup": speedup, "memory": {"logprob_pass": memory}, "gap": max(gaps)}


def experience_of(prompt: int, completions: list[int], *, group_size: int) -> Experience:
    """Random tokens: a row per completion, the prompt of each group its own, `group_size` neighbours a group."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([prompt + length for length in completions])
    rows, longest = len(completions), int(lengths.max())
    places = torch.arange(longest)[None]
    ids = torch.randint(100, 40000, (rows, longest), generator=generator)
    ids[:, :prompt] = ids[::group_size, :prompt].repeat_interleave(group_size, dim=0)
    return Experience(
        input_ids=ids,
        lengths=lengths,
        mask=(places >= prompt) & (places < lengths[:, None]),
        log_probs=torch.zeros(rows, longest),
        versions=torch.zeros(rows, longest, dtype=torch.int32),
        rewards=torch.zeros(rows),
        groups=torch.arange(rows) // group_size,
    )


def _compare(scorer: LogProbModel, experience: Experience, groups: list[Tensor], layout: Layout) -> tuple[float, float]:
    """How many times faster than padded, and the largest difference of a log-prob."""
    ways = [micro_batches(experience, groups, layout=way, max_tokens=MAX_TOKENS) for way in ("padded", layout)]
    times: list[list[float]] = [[], []]
    found = [torch.zeros(experience.mask.shape), torch.zeros(experience.mask.shape)]
    for _ in range(ROUNDS):
        for batches, seconds, log_probs in zip(ways, times, found, strict=True):
            start = time.perf_counter()
            for batch in batches:
                _pass(scorer, batch, log_probs)
            seconds.append(time.perf_counter() - start)
            scorer.zero_grad()
    return median(times[0]) / median(times[1]), float((found[0] - found[1]).abs().max())


def _pass(scorer: LogProbModel, batch: MicroBatch, into: Tensor) -> None:
    places = (batch.input_ids, batch.position_ids, batch.attention_mask, batch.predict, batch.targets)
    log_probs, _ = scorer(*places, 1.0)
    log_probs.sum().backward()
    into[batch.rows, batch.columns] = log_probs.detach()


def log_prob_memory() -> float:
    """Peak memory of the log-prob pass over that of the naive one, which holds all logits; each in its own process."""
    return _peak(_chunked) / _peak(_naive)


def _chunked(head: nn.Linear, hidden: Tensor, targets: Tensor) -> None:
    head_log_probs(head, hidden, targets, 1.0)[0].sum().backward()


def _naive(head: nn.Linear, hidden: Tensor, targets: Tensor) -> None:
    log_probs_and_entropy(head(hidden), targets, 1.0)[0].sum().backward()


def _peak(work: Callable[[nn.Linear, Tensor, Tensor], None]) -> float:
    """Bytes that a forward and backward pass needs on top of its inputs and the head's weights and gradient."""
    receiver, sender = multiprocessing.get_context("spawn").Pipe(duplex=False)
    child = multiprocessing.get_context("spawn").Process(target=_measure, args=(work, sender))
    child.start()
    sender.close()
    used: float = receiver.recv()
    child.join()
    return used


def _measure(work: Callable[[nn.Linear, Tensor, Tensor], None], sender: Connection) -> None:
    torch.set_num_threads(1)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (TOKENS,))
    work(head, hidden[:8], targets[:8])  # gradients exist, libraries are loaded
    before = _resident("VmRSS")
    work(head, hidden, targets)
    sender.send(_resident("VmHWM") - before)


def _resident(name: str) -> float:
    """Bytes of memory, now (VmRSS) or at most so far (VmHWM), as Linux counts them."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return float(line.split()[1]) * 1024
