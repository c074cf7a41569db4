"""The model that is trained: ColossalAI's Booster around log-probs, an optimizer and a learning-rate schedule.

colossalai is imported here and in cpu_accelerator.py alone. M = sampled tokens of one micro-batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin
from colossalai.nn.optimizer import HybridAdam
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, get_scheduler

from rayless.trainers.cpu_accelerator import enable_cpu
from rayless.trainers.logprobs import LogProbModel
from rayless.trainers.model_config import ModelConfig, OptimizerConfig, PluginConfig
from rayless.trainers.packing import MicroBatch


class Policy:
    """A causal language model that can be scored, stepped, published and saved."""

    def __init__(
        self,
        model: ModelConfig,
        plugin: PluginConfig,
        optimizer: OptimizerConfig,
        *,
        device: torch.device,
        path: str | None = None,
    ) -> None:
        """`path`: where to load weights from when that is not the model's own folder (a checkpoint)."""
        self.device = device
        self.plugin = plugin
        # fp32 until the plugin casts: ZeRO makes its master weights of what it is given, ddp trains these themselves.
        network = load_model(model, device, torch.float32, path=path)
        if model.gradient_checkpointing:
            network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        network.train()
        booster_plugin = _booster_plugin(plugin, device)
        self.booster = Booster(plugin=booster_plugin)
        scorer = LogProbModel(network)
        raw = _optimizer(scorer, optimizer, device)
        schedule = get_scheduler(
            "constant_with_warmup" if optimizer.schedule == "constant" else optimizer.schedule,
            raw,
            num_warmup_steps=optimizer.warmup_steps,
            num_training_steps=optimizer.total_steps,
        )
        self.model, self.optimizer, _, _, self.scheduler = self.booster.boost(scorer, raw, lr_scheduler=schedule)

    def log_probs(self, batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-prob ([M] fp32, with gradient) and entropy ([M] fp32) of each sampled token."""
        return _score(self.model, batch, temperature, autocast=self._autocast)

    @property
    def _autocast(self) -> bool:
        # ZeRO casts the model itself; under ddp the fp32 master weights are cast for each matrix product.
        return self.plugin.plugin == "ddp" and self.plugin.precision == "bf16"

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Add the loss's gradient. Every rank calls it equally often; gradients are exchanged at a step's last call."""
        may_wait = not is_last and self.booster.plugin.support_no_sync()
        with self.booster.no_sync(self.model, self.optimizer) if may_wait else contextlib.nullcontext():
            self.booster.backward(loss, self.optimizer)

    def step(self) -> float:
        """One optimizer step and one schedule step; gives the gradient norm before clipping."""
        if self.plugin.plugin == "ddp":
            norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.plugin.max_norm))
            self.optimizer.step()
        else:
            self.optimizer.step()
            norm = float(self.optimizer.get_grad_norm())
        self.optimizer.zero_grad()
        self.scheduler.step()
        return norm

    @property
    def learning_rate(self) -> float:
        """What the next step will use."""
        return float(self.scheduler.get_last_lr()[0])

    @property
    def network(self) -> Any:
        """The transformers model inside; its parameters are whole on every rank (ddp, ZeRO 1 and 2)."""
        return self.model.unwrap().model

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and tensors; a tied head comes once, as the embedding."""
        return iter(self.network.named_parameters())


def load_model(model: ModelConfig, device: torch.device, dtype: torch.dtype, *, path: str | None = None) -> Any:
    """The transformers model on `device`."""
    return AutoModelForCausalLM.from_pretrained(
        path or model.path,
        dtype=dtype,
        attn_implementation=model.attn_implementation,
        trust_remote_code=model.trust_remote_code,
    ).to(device)


class ReferencePolicy:
    """The frozen model that the KL term holds the policy to."""

    def __init__(self, model: ModelConfig, plugin: PluginConfig, *, device: torch.device) -> None:
        dtype = torch.bfloat16 if plugin.precision == "bf16" else torch.float32
        self.model = LogProbModel(load_model(model, device, dtype).eval().requires_grad_(False))

    @torch.no_grad()
    def log_probs(self, batch: MicroBatch, temperature: float) -> Tensor:
        """[M] fp32."""
        return _score(self.model, batch, temperature, autocast=False)[0]


def _score(model: Any, batch: MicroBatch, temperature: float, *, autocast: bool) -> tuple[Tensor, Tensor]:
    with torch.autocast(batch.input_ids.device.type, torch.bfloat16, enabled=autocast), _attention(batch):
        return model(
            batch.input_ids, batch.position_ids, batch.attention_mask, batch.predict, batch.targets, temperature
        )


def _attention(batch: MicroBatch) -> contextlib.AbstractContextManager[None]:
    """On CPU, fused attention's backward pass is several times slower than plain matrix products under a full mask."""
    if batch.input_ids.device.type == "cpu" and batch.attention_mask.dim() == 4:
        context: contextlib.AbstractContextManager[None] = sdpa_kernel(SDPBackend.MATH)
        return context
    return contextlib.nullcontext()


def _booster_plugin(config: PluginConfig, device: torch.device) -> Any:
    if config.plugin == "ddp":
        return TorchDDPPlugin(gradient_as_bucket_view=True)
    if device.type == "cpu":
        enable_cpu()
    return LowLevelZeroPlugin(stage=config.zero_stage, precision=config.precision, max_norm=config.max_norm)


def _optimizer(model: torch.nn.Module, config: OptimizerConfig, device: torch.device) -> torch.optim.Optimizer:
    # HybridAdam is fused, and its kernel exists for CUDA alone.
    options: dict[str, Any] = {"lr": config.lr, "betas": (0.9, 0.95), "weight_decay": config.weight_decay}
    if device.type == "cuda":
        return HybridAdam(model.parameters(), **options)
    return torch.optim.AdamW(model.parameters(), fused=True, **options)
