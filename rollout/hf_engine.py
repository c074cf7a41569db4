"""The reference engine: transformers' generate, one group after the other, on one rank.

G completions of a prompt of P tokens, V tokens in the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from rayless.rollout.engine import Completion, RolloutConfig, end_token_ids, kept_tokens


class HFEngine:
    """See rayless.rollout.engine.Engine."""

    def __init__(
        self, model_path: str, tokenizer: Any, config: RolloutConfig, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype).to(device).eval()
        self.end_ids = end_token_ids(model_path, tokenizer)
        # generate() fills what is unset from the model's own settings, some of which would bend the distribution.
        self.model.generation_config = GenerationConfig()
        self.version = 0
        self.waiting: list[tuple[int, list[int], int]] = []

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def add(self, number: int, prompt_ids: Sequence[int], *, seed: int) -> None:
        self.waiting.append((number, list(prompt_ids), seed))

    def step(self) -> list[tuple[int, list[Completion]]]:
        if not self.waiting:
            return []
        number, prompt_ids, seed = self.waiting.pop(0)
        return [(number, self._generate(prompt_ids, seed))]

    @torch.no_grad()
    def _generate(self, prompt_ids: list[int], seed: int) -> list[Completion]:
        devices = [self.model.device] if self.model.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            output = self.model.generate(
                torch.tensor([prompt_ids], device=self.model.device),
                attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.int64, device=self.model.device),
                generation_config=GenerationConfig(
                    do_sample=True,
                    temperature=self.config.temperature,
                    top_k=0,
                    top_p=1.0,
                    num_return_sequences=self.config.num_generations,
                    max_new_tokens=self.config.max_new_tokens,
                    eos_token_id=self.end_ids,
                    pad_token_id=self.end_ids[0] if self.end_ids else 0,
                    stop_strings=self.config.stop or None,
                    output_logits=True,
                    return_dict_in_generate=True,
                ),
                tokenizer=self.tokenizer,
            )
        new_ids = output.sequences[:, len(prompt_ids) :].cpu()  # [G, n]
        log_probs = torch.stack([self._log_probs(logits) for logits in output.logits], dim=1)  # [G, n, V]
        sampled = log_probs.gather(-1, new_ids[..., None]).squeeze(-1)  # [G, n]
        return [self._completion(ids, own) for ids, own in zip(new_ids.tolist(), sampled.tolist(), strict=True)]

    def _log_probs(self, logits: Tensor) -> Tensor:
        return torch.log_softmax(logits.float() / self.config.temperature, dim=-1).cpu()

    def _completion(self, token_ids: list[int], log_probs: list[float]) -> Completion:
        kept, truncated = kept_tokens(token_ids, self.end_ids, self.config.max_new_tokens)
        text = self.tokenizer.decode(token_ids[:kept], skip_special_tokens=True)
        if self.config.stop:
            kept, truncated = self._cut_at_stop(token_ids[:kept], truncated)
        return Completion(
            token_ids=token_ids[:kept],
            log_probs=log_probs[:kept],
            versions=[self.version] * kept,
            text=text,
            truncated=truncated,
        )

    def load_weights(self, tensors: Iterator[tuple[str, Tensor]], *, version: int) -> None:
        own = dict(self.model.named_parameters())
        tied = {name for name, _ in self.model.named_parameters(remove_duplicate=False)} - set(own)
        with torch.no_grad():
            for name, tensor in tensors:
                if name in tied:
                    continue  # it follows the parameter it is tied to
                if name not in own:
                    raise RuntimeError(f"weights version {version}: the engine's model has no {name}")
                own.pop(name).copy_(tensor)
        if own:
            raise RuntimeError(f"weights version {version}: the engine never received {', '.join(sorted(own))}")
        self.version = version

    def close(self) -> None:
        del self.model
