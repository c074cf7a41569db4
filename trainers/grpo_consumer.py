"""The training role: take experience, update the policy, publish its weights.

B rows of one optimizer step in groups of G completions; M sampled tokens of one micro-batch. Every trainer holds the
whole step's experience, so advantages and the loss denominator need no communication; each works on its own groups.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rayless.comm.experience import Experience
from rayless.comm.topology import Topology
from rayless.trainers.advantages import advantages as estimate_advantages
from rayless.trainers.advantages import group_advantages, has_signal
from rayless.trainers.aggregation import Totals
from rayless.trainers.base_consumer import BaseConsumer
from rayless.trainers.grpo_config import GRPOConfig, as_config, with_arguments
from rayless.trainers.kl import adapted_coefficient, kl_in_reward
from rayless.trainers.model_config import ModelConfig, OptimizerConfig, PluginConfig
from rayless.trainers.packing import MicroBatch
from rayless.trainers.policy import Policy, ReferencePolicy
from rayless.trainers.step_batch import StepBatch, make_step_batch
from rayless.trainers.step_loss import UpdateCounts, step_loss
from rayless.trainers.step_scores import StepScores, kl_of_rows, needs_scores, prepare_tokens, score_step


class GRPOConsumer(BaseConsumer):
    """Policy optimization on groups of completions (DeepSeekMath, 2024): the loss that `grpo_config` composes."""

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
        temperature = self.grpo_config.temperature
        if self.grpo_config.aggregation == "fixed_length" and self.grpo_config.loss_length is None:
            raise ValueError("grpo_config.loss_length must be given where aggregation is fixed_length")
        self.temperature = 1.0 if temperature is None else temperature
        # Who may look where is told by a mask; other attentions than sdpa take none.
        self.can_mask = self.model_config.attn_implementation == "sdpa"
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

    @property
    def beta(self) -> float:
        """Weight of the KL now: the configured one until `kl_target` steers it."""
        steered = self.progress.beta if self.grpo_config.kl_target is not None else None
        return steered if steered is not None else self.grpo_config.beta or 0.0

    def take(self, experience: Experience, advantages: Tensor | None = None) -> None:
        """Make this whole step's experience what the next calls of `step` train on.

        `advantages` ([B] float32) replaces those that the configured estimator gives.
        """
        config = self.grpo_config
        late = advantages is None and config.kl_in == "reward" and self.beta > 0  # they follow from the KL
        if advantages is None:
            early = torch.ones_like(experience.rewards) if late else self._advantages(experience, experience.rewards)
        else:
            early = advantages
        assert len(early) == len(experience), f"{len(early)} advantages for {len(experience)} rows"
        batch = make_step_batch(
            experience,
            early,
            group_size=self.num_generations,
            groups_per_call=self.minibatch_size,
            rank=self.rank,
            num_ranks=self.world_size,
            skip_without_signal=config.follows_advantages and advantages is None,
            layout="padded" if config.layout == "auto" and not self.can_mask else config.layout,
            hidden_size=self.policy.hidden_size,
            max_tokens=config.max_tokens_per_microbatch,
            device=self.topology.device,
        )
        scores = self._scores(batch) if needs_scores(config) else None
        if late and scores:
            kl = kl_of_rows(scores, experience, config)
            rewards = kl_in_reward(experience.rewards, kl, self.beta)
            batch = replace(batch, advantages=self._advantages(experience, rewards))
        self.batch = batch
        self.tokens = prepare_tokens(batch, scores, config, seed=self.progress.steps)
        self.calls_made = self.passes_made = 0
        self.update_counts = UpdateCounts(self.topology.device)

    def _advantages(self, experience: Experience, rewards: Tensor) -> Tensor:
        lengths = experience.mask.sum(dim=1)
        return estimate_advantages(rewards, self.num_generations, lengths=lengths, config=self.grpo_config)

    def _scores(self, batch: StepBatch) -> StepScores:
        every = [micro_batch for call in batch.calls for micro_batch in call]
        device = self.topology.device
        return score_step(
            self.policy, self.reference, every, batch.experience, temperature=self.temperature, device=device
        )

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
        moved, known = micro_batch.to(device), self.tokens.of(micro_batch, device)
        with self.policy.one_pass(is_last=self.passes_made == batch.num_passes):
            log_probs, entropy = self.policy.log_probs(
                moved, self.temperature, entropy_gradient=config.entropy_coef > 0
            )
            reference = known.reference
            if reference is None and self.reference:
                reference = self.reference.log_probs(moved, self.temperature)
            result = step_loss(
                log_probs,
                entropy,
                known=known,
                reference=reference,
                advantages=batch.advantages[micro_batch.rows].to(device),
                rows=moved.rows,
                config=config,
                beta=self.beta,
                totals=self._totals(batch),
            )
            self.policy.backward(result.loss)
        self.update_counts.add(result, log_probs, entropy, known, moved.rows)

    def _totals(self, batch: StepBatch) -> Totals:
        return Totals(
            num_tokens=batch.num_tokens,
            num_rows=len(batch.experience),
            length=float(self.grpo_config.loss_length or 1),
            num_ranks=self.world_size,
        )

    def _finish(self, batch: StepBatch) -> float:
        learning_rate = self.policy.learning_rate
        norm = self.policy.step()
        sums, maxima = self.update_counts.over_ranks()
        computed = sums.pop("tokens")
        loss = sums.pop("loss") / self.world_size
        ratios, squares = sums.pop("ratios"), sums.pop("squared_ratios")
        add = self.counts.add
        # Kish's effective sample size over the number of tokens.
        add("correction/ess", ratios**2, squares * computed)
        kl = sums.pop("policy/kl")
        if self.reference:
            add("policy/kl", kl, computed)
            add("policy/beta", self.beta, 1)
            self._steer(kl / max(computed, 1), len(batch.experience))
        # Means over the tokens that were computed: groups without signal may have been skipped.
        for name, total in sums.items():
            add(name, total, computed)
        for name, peak in maxima.items():
            add(name, peak, float(computed > 0))
        add("train/loss", loss, 1)
        add("train/grad_norm", norm, 1)
        add("train/lr", learning_rate, 1)
        add("train/tokens", batch.num_tokens, 1)
        self._count_rewards(batch.experience)
        return loss

    def _steer(self, kl: float, num_rows: int) -> None:
        """Move the KL coefficient towards `kl_target`; every rank has the same numbers."""
        config = self.grpo_config
        if config.kl_target is not None:
            beta = adapted_coefficient(self.beta, kl, num_rows, target=config.kl_target, horizon=config.kl_horizon)
            self.progress = replace(self.progress, beta=beta)

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
