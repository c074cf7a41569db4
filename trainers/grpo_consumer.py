"""The training role: take experience, update the policy, publish its weights.

B rows of one optimizer step in groups of G completions; M sampled tokens of one micro-batch. Every trainer holds the
whole step's experience, so advantages and the loss denominator need no communication; each works on its own groups.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rayless.comm.collectives import role_max, role_sum
from rayless.comm.experience import Experience
from rayless.comm.topology import Topology
from rayless.trainers.advantages import group_advantages, has_signal
from rayless.trainers.base_consumer import BaseConsumer
from rayless.trainers.grpo_config import GRPOConfig, as_config, with_arguments
from rayless.trainers.losses import clipped_loss, kl_k3, token_mean
from rayless.trainers.model_config import ModelConfig, OptimizerConfig, PluginConfig
from rayless.trainers.packing import MicroBatch
from rayless.trainers.policy import Policy, ReferencePolicy
from rayless.trainers.step_batch import StepBatch, make_step_batch


class GRPOConsumer(BaseConsumer):
    """Group relative policy optimization (DeepSeekMath, 2024) with DAPO's asymmetric clip and token-level loss."""

    def __init__(
        self,
        num_producers: int,
        num_episodes: int,
        rank: int,
        world_size: int,
        master_addr: str,
        master_port: int,
        num_update_per_episode: int,
        num_recv_per_update: int | None,
        batch_size: int,
        model_config: dict[str, Any] | ModelConfig,
        plugin_config: dict[str, Any] | PluginConfig,
        minibatch_size: int = 1,
        num_generations: int = 8,
        grpo_config: dict[str, Any] | GRPOConfig = {},  # noqa: B006 - the signature that users know; never changed
        save_interval: int = 100,
        save_dir: str = "./model",
    ) -> None:
        """Arguments mean what the configuration's keys of the same names mean; `rank` and `world_size` count trainers.

        `batch_size` counts the prompts of the whole job. Raises ValueError when numbers contradict each other.
        """
        super().__init__(
            num_producers,
            num_episodes,
            rank,
            world_size,
            master_addr,
            master_port,
            num_update_per_episode,
            num_recv_per_update,
            batch_size,
            minibatch_size=minibatch_size,
            num_generations=num_generations,
            save_interval=save_interval,
            save_dir=save_dir,
        )
        self.model_config = as_config(ModelConfig, model_config, "model_config")
        self.plugin_config = as_config(PluginConfig, plugin_config, "plugin_config")
        self.grpo_config = with_arguments(
            grpo_config,
            batch_size=batch_size,
            minibatch_size=minibatch_size,
            num_update_per_episode=num_update_per_episode,
            num_generations=num_generations,
        )
        self.temperature = self.grpo_config.temperature or 1.0
        self.batch: StepBatch | None = None

    def build(self, topology: Topology, *, total_steps: int, path: str | None) -> Policy:
        config = self.grpo_config
        optimizer = OptimizerConfig(
            lr=config.lr,
            weight_decay=config.weight_decay,
            schedule=config.schedule,
            warmup_steps=config.warmup_steps,
            total_steps=total_steps,
        )
        # Always the model that the run started from, never a checkpoint of the trained one.
        self.reference = (
            ReferencePolicy(self.model_config, self.plugin_config, device=topology.device) if config.beta else None
        )
        return Policy(self.model_config, self.plugin_config, optimizer, device=topology.device, path=path)

    def take(self, experience: Experience, advantages: Tensor | None = None) -> None:
        """Make this whole step's experience what the next calls of `step` train on.

        `advantages` ([B] float32) replaces the group-relative ones.
        """
        config = self.grpo_config
        given = advantages is not None
        if advantages is None:
            advantages = group_advantages(experience.rewards, self.num_generations, scale=config.scale_rewards)
        assert len(advantages) == len(experience), f"{len(advantages)} advantages for {len(experience)} rows"
        self.batch = make_step_batch(
            experience,
            advantages,
            group_size=self.num_generations,
            groups_per_call=self.minibatch_size,
            rank=self.rank,
            num_ranks=self.world_size,
            skip_without_signal=config.beta == 0 and not given,
            layout=config.layout,
            max_tokens=config.max_tokens_per_microbatch,
            device=self.topology.device,
        )
        self.calls_made = self.passes_made = 0
        self.totals = torch.zeros(len(_TOTALS), dtype=torch.float64, device=self.topology.device)
        self.maxima = torch.zeros(len(_MAXIMA), dtype=torch.float64, device=self.topology.device)

    def step(self, step_idx: int, pbar: Any, **kwargs: Any) -> float | None:
        """Train on the next `minibatch_size` prompts of this rank; the loss after a step's last call, else None.

        `experience=` (and `advantages=`) start a new step with a batch given by hand. Without a batch nothing happens.
        `pbar` may be any progress bar with tqdm's `update` and `set_postfix`, or None.
        """
        if "experience" in kwargs:
            self.ensure_setup()
            self.open_books()
            self.take(kwargs["experience"], kwargs.get("advantages"))
        if self.batch is None:
            return None
        for micro_batch in self.batch.calls[self.calls_made]:
            self.passes_made += 1
            self._backward(self.batch, micro_batch)
        self.calls_made += 1
        if self.calls_made < len(self.batch.calls):
            return None
        loss, num_tokens = self._finish(self.batch), self.batch.num_tokens
        self.batch = None
        if pbar is not None:
            reward = self.counts.means()["reward/mean"]
            pbar.set_postfix(step=step_idx + 1, reward=reward, loss=loss, tokens=num_tokens)
            pbar.update(1)
        return loss

    def _backward(self, batch: StepBatch, micro_batch: MicroBatch) -> None:
        device, config = self.topology.device, self.grpo_config
        rows, columns = micro_batch.rows, micro_batch.columns
        old = batch.experience.log_probs[rows, columns].to(device)  # [M]
        advantages = batch.advantages[rows].to(device)  # [M]
        moved = micro_batch.to(device)
        with self.policy.one_pass(is_last=self.passes_made == batch.num_passes):
            log_probs, entropy = self.policy.log_probs(moved, self.temperature)
            clipped = clipped_loss(log_probs, old, advantages, clip_low=config.clip_low, clip_high=config.clip_high)
            loss, kl = clipped.loss, torch.zeros_like(log_probs)
            if self.reference:
                kl = kl_k3(log_probs, self.reference.log_probs(moved, self.temperature))
                loss = loss + config.beta * kl
            self.policy.backward(token_mean(loss, batch.num_tokens, num_ranks=self.world_size))
        with torch.no_grad():
            gap = (log_probs - old).abs()
            values = (loss, kl, entropy, clipped.clipped, clipped.ratio, gap, torch.ones_like(loss))
            self.totals += torch.stack([value.double().sum() for value in values])
            if len(rows):
                peaks = torch.stack([clipped.ratio.double().max(), gap.double().max()])
                self.maxima = torch.maximum(self.maxima, peaks)

    def _finish(self, batch: StepBatch) -> float:
        learning_rate = self.policy.learning_rate
        norm = self.policy.step()
        totals = dict(zip(_TOTALS, role_sum(self.totals).tolist(), strict=True))
        maxima = role_max(self.maxima).tolist()
        loss = totals.pop("loss") / max(batch.num_tokens, 1)
        computed = totals.pop("tokens")
        add = self.counts.add
        # Means over the tokens that were computed: groups without signal may have been skipped.
        for name, total in totals.items():
            if name != "policy/kl" or self.reference:
                add(name, total, computed)
        for name, peak in zip(_MAXIMA, maxima, strict=True):
            add(name, peak, float(computed > 0))
        add("train/loss", loss, 1)
        add("train/grad_norm", norm, 1)
        add("train/lr", learning_rate, 1)
        add("train/tokens", batch.num_tokens, 1)
        self._count_rewards(batch.experience)
        return loss

    def _count_rewards(self, experience: Experience) -> None:
        rewards = experience.rewards.double().view(-1, self.num_generations)  # [B/G, G]
        lengths = experience.mask.sum(dim=1)  # [B]
        ages = (self.policy_version - experience.versions)[experience.mask].double()
        add = self.counts.add
        add("reward/mean", rewards.sum().item(), rewards.numel())
        if self.num_generations > 1:
            add("reward/std", rewards.std(dim=1).sum().item(), len(rewards))
        equal = ~has_signal(group_advantages(experience.rewards, self.num_generations), self.num_generations)
        add("reward/zero_std_fraction", equal.sum().item(), len(rewards))
        add("completion/length_mean", lengths.sum().item(), len(lengths))
        add("completion/length_max", lengths.max().item(), 1)
        add("staleness/mean", ages.sum().item(), len(ages))
        add("staleness/max", ages.max().item() if len(ages) else 0.0, 1)


# The order of GRPOConsumer.totals and .maxima.
_TOTALS = (
    "loss",
    "policy/kl",
    "policy/entropy",
    "policy/clip_fraction",
    "policy/ratio_mean",
    "policy/logprob_diff_mean",
    "tokens",
)
_MAXIMA = ("policy/ratio_max", "policy/logprob_diff_max")
