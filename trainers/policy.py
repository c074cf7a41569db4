"""The model that is trained: ColossalAI's Booster around log-probs, an optimizer and a learning-rate schedule.

colossalai is imported here and in cpu_accelerator.py alone. M = sampled tokens of one micro-batch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin
from colossalai.nn.optimizer import HybridAdam
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM

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
        self.plugin, self.settings = plugin, optimizer
        # fp32 until the plugin casts: ddp trains these themselves, ZeRO makes its master weights of its bf16 copy.
        network = load_model(model, device, torch.float32, path=path)
        if model.gradient_checkpointing:
            network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        # Nothing is dropped at random: the first step's log-probs are to equal the sampler's. Only in training mode do
        # transformers' layers checkpoint.
        network.train(model.gradient_checkpointing)
        if device.type == "cpu":
            # Under a full mask its backward pass is several times slower than plain matrix products.
            torch.backends.cuda.enable_flash_sdp(False)
        booster_plugin = _booster_plugin(plugin, device)
        self.booster = Booster(plugin=booster_plugin)
        scorer = LogProbModel(network)
        raw = _optimizer(scorer, optimizer, device)
        schedule = LambdaLR(raw, lambda step: lr_factor(step, optimizer))
        exact = {name: buffer.clone() for name, buffer in scorer.named_buffers() if buffer.is_floating_point()}
        self.model, self.optimizer, _, _, self.scheduler = self.booster.boost(scorer, raw, lr_scheduler=schedule)
        # ZeRO casts buffers, too. Rotary frequencies in bf16 turn far tokens by radians, which no sampler does.
        for name, buffer in self.model.unwrap().named_buffers():
            if name in exact:
                buffer.data = exact[name].to(device)

    def log_probs(
        self, batch: MicroBatch, temperature: float, *, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Log-prob ([M] fp32, with gradient) and entropy ([M] fp32, with one if wanted) of each sampled token."""
        return _score(self.model, batch, temperature, autocast=self._autocast, entropy_gradient=entropy_gradient)

    @property
    def _autocast(self) -> bool:
        # ZeRO casts the model itself; under ddp the fp32 master weights are cast for each matrix product.
        return self.plugin.plugin == "ddp" and self.plugin.precision == "bf16"

    def one_pass(self, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """Surrounds `log_probs` and `backward` of one micro-batch; every rank makes equally many passes in a step.

        Where the plugin allows it, ranks exchange gradients in a step's last pass alone.
        """
        may_wait = not is_last and self.booster.plugin.support_no_sync()
        context: contextlib.AbstractContextManager[None] = (
            self.booster.no_sync(self.model, self.optimizer) if may_wait else contextlib.nullcontext()
        )
        return context

    def backward(self, loss: Tensor) -> None:
        """Add the loss's gradient."""
        self.booster.backward(loss, self.optimizer)

    def resume_schedule(self, steps: int) -> None:
        """Put the learning rate where it stands after so many optimizer steps."""
        self.scheduler.last_epoch = steps
        rates = [base * lr_factor(steps, self.settings) for base in self.scheduler.base_lrs]
        for group, rate in zip(self.optimizer.optim.param_groups, rates, strict=True):
            group["lr"] = rate
        self.scheduler._last_lr = rates

    def step(self) -> float:
        """One optimizer step and one schedule step; gives the gradient norm before clipping."""
        if self.plugin.plugin == "ddp":
            norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.plugin.max_norm))
            self.optimizer.step()
        else:
            self.optimizer.step()
            norm = float(self.optimizer.get_grad_norm())
        if not math.isfinite(norm):  # on all ranks: all of them stop, before such weights are published or saved
            raise RuntimeError(f"the gradient's norm is {norm}: a loss or a weight is no finite number any more")
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

    @property
    def hidden_size(self) -> int:
        """H of the network's layers."""
        return int(self.network.config.get_text_config().hidden_size)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and tensors; a tied head comes once, as the embedding."""
        return iter(self.network.named_parameters())


def lr_factor(step: int, config: OptimizerConfig) -> float:
    """Learning rate of optimizer step `step` (from 0) over its peak: a rise that ends at the peak, then the schedule.

    Linear and cosine fall to 0 at `total_steps`, which is after the last step.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    done = min(1.0, (step - config.warmup_steps) / max(1, config.total_steps - config.warmup_steps))
    return 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


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


def _score(
    model: Any, batch: MicroBatch, temperature: float, *, autocast: bool, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    places = (batch.input_ids, batch.position_ids, batch.attention_mask, batch.predict, batch.targets)
    with torch.autocast(batch.input_ids.device.type, torch.bfloat16, enabled=autocast):
        return model(*places, temperature, entropy_gradient=entropy_gradient)


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
