"""The reference engine: transformers' generate, one group after the other, on one rank.

G completions of a prompt of P tokens, V tokens in the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteriaList

from rayless.rollout.engine import Completion, RolloutConfig, end_token_ids, kept_tokens, text_before_stop


class HFEngine:
    """See rayless.rollout.engine.Engine."""

    def __init__(
        self,
        model_path: str,
        tokenizer: Any,
        config: RolloutConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        trust_remote_code: bool = False,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype, trust_remote_code=trust_remote_code)
        self.model = model.to(device).eval()
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
        start, device = len(prompt_ids), self.model.device

        def stopped(input_ids: Tensor, scores: Tensor, **unused: Any) -> Tensor:
            texts = [self._text(ids[start:]) for ids in input_ids.tolist()]
            return torch.tensor([text_before_stop(text, self.config.stop) is not None for text in texts], device=device)

        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            output = self.model.generate(
                torch.tensor([prompt_ids], device=device),
                attention_mask=torch.ones(1, start, dtype=torch.int64, device=device),
                generation_config=GenerationConfig(
                    do_sample=True,
                    temperature=self.config.temperature,
                    top_k=0,
                    top_p=1.0,
                    num_return_sequences=self.config.num_generations,
                    max_new_tokens=self.config.max_new_tokens,
                    eos_token_id=self.end_ids or None,
                    pad_token_id=self.end_ids[0] if self.end_ids else 0,
                    output_logits=True,
                    return_dict_in_generate=True,
                ),
                stopping_criteria=StoppingCriteriaList([stopped] if self.config.stop else []),
            )
        new_ids = output.sequences[:, start:]  # [G, n]
        sampled = [
            torch.log_softmax(logits.float() / self.config.temperature, dim=-1).gather(-1, ids[:, None])
            for logits, ids in zip(output.logits, new_ids.T, strict=True)  # [G, V], [G]
        ]
        log_probs = torch.cat(sampled, dim=1).tolist()  # [G, n]
        return [self._completion(ids, own) for ids, own in zip(new_ids.tolist(), log_probs, strict=True)]

    def _completion(self, token_ids: list[int], log_probs: list[float]) -> Completion:
        kept, truncated = kept_tokens(token_ids, self.end_ids, self.config.max_new_tokens)
        text = self._text(token_ids[:kept])
        if (stopped := self._stop(token_ids[:kept])) is not None:
            (kept, text), truncated = stopped, False
        return Completion(
            token_ids=token_ids[:kept],
            log_probs=log_probs[:kept],
            versions=[self.version] * kept,
            text=text,
            truncated=truncated,
        )

    def _stop(self, token_ids: list[int]) -> tuple[int, str] | None:
        """How many tokens it takes to complete a stop text, and the text before it."""
        for kept in range(1, len(token_ids) + 1 if self.config.stop else 0):
            text = text_before_stop(self._text(token_ids[:kept]), self.config.stop)
            if text is not None:
                return kept, text
        return None

    def _text(self, token_ids: list[int]) -> str:
        # An end token need not be a special one.
        return self.tokenizer.decode([one for one in token_ids if one not in self.end_ids], skip_special_tokens=True)

    def load_weights(self, tensors: Iterator[tuple[str, Tensor]], *, version: int) -> None:
        assert not self.busy, "weights change between groups"
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
