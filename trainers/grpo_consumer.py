"""The training role: take experience, update the policy, publish its weights.

B rows of one optimizer step in groups of G completions; M sampled tokens of one micro-batch. Every trainer holds the
whole step's experience, so advantages and the loss denominator need no communication; each works on its own groups.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rayless.comm.collectives import role_max, role_sum
from rayless.comm.experience import Experience
from rayless.comm.topology import Topology
from rayless.trainers.advantages import advantages as estimate_advantages
from rayless.trainers.advantages import group_advantages, has_signal
from rayless.trainers.aggregation import Totals, token_weights, total_loss
from rayless.trainers.base_consumer import BaseConsumer
from rayless.trainers.correction import gap_summaries
from rayless.trainers.grpo_config import GRPOConfig, as_config, with_arguments
from rayless.trainers.kl import adapted_coefficient, kl_per_token
from rayless.trainers.losses import Tokens, off_policy_mask, policy_terms
from rayless.trainers.model_config import ModelConfig, OptimizerConfig, PluginConfig
from rayless.trainers.packing import MicroBatch
from rayless.trainers.policy import Policy, ReferencePolicy
from rayless.trainers.step_batch import StepBatch, make_step_batch
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
        self.temperature = 1.0 if temperature is None else temperature
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
        return self.grpo_config.beta or 0.0 if self.progress.beta is None else self.progress.beta

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
            layout=config.layout,
            max_tokens=config.max_tokens_per_microbatch,
            device=self.topology.device,
        )
        scores = self._scores(batch) if needs_scores(config) else None
        if late and scores:
            kl = kl_of_rows(scores, experience, config)
            batch = replace(batch, advantages=self._advantages(experience, experience.rewards - self.beta * kl))
        self.batch = batch
        self.tokens = prepare_tokens(batch, scores, config, seed=self.progress.steps)
        self.calls_made = self.passes_made = 0
        self.totals = torch.zeros(len(_TOTALS), dtype=torch.float64, device=self.topology.device)
        self.maxima = torch.zeros(len(_MAXIMA), dtype=torch.float64, device=self.topology.device)

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
        assert config.aggregation, "a LossConfig fills it in"
        moved = micro_batch.to(device)
        num_rows = len(batch.experience)
        with self.policy.one_pass(is_last=self.passes_made == batch.num_passes):
            log_probs, entropy = self.policy.log_probs(
                moved, self.temperature, entropy_gradient=config.entropy_coef > 0
            )
            known = self.tokens.of(micro_batch, device)
            tokens = Tokens(
                log_probs=log_probs,
                old_log_probs=known.old_log_probs,
                advantages=batch.advantages[micro_batch.rows].to(device),
                rows=moved.rows,
                num_rows=num_rows,
                weights=known.weights,
                chosen=known.chosen,
            )
            terms = policy_terms(tokens, config)
            policy = terms.loss
            if known.kept is not None:
                policy = policy.masked_fill(~known.kept, 0.0)
            if config.off_policy_threshold is not None:
                since = replace(tokens, old_log_probs=known.sampled_log_probs)
                policy = policy.masked_fill(~off_policy_mask(since, config.off_policy_threshold), 0.0)
            kl = self._kl(moved, log_probs, terms.ratio)
            loss = total_loss(
                policy,
                token_weights(moved.rows, num_rows, config.aggregation, self._counts(batch)),
                kl=kl,
                beta=self.beta if config.kl_in == "loss" else 0.0,
                entropy=entropy,
                entropy_weights=token_weights(moved.rows, num_rows, "token_mean", self._counts(batch)),
                entropy_coef=config.entropy_coef,
            )
            self.policy.backward(loss)
        with torch.no_grad():
            gap = gap_summaries(log_probs, known.sampled_log_probs, moved.rows, num_rows)
            self.totals += torch.stack(
                [
                    loss.double() / self.world_size,
                    torch.zeros_like(log_probs).double().sum() if kl is None else kl.double().sum(),
                    entropy.double().sum(),
                    (terms.clipped_low | terms.clipped_high).double().sum(),
                    terms.ratio.double().sum(),
                    gap["abs"].total,
                    gap["k1"].total,
                    gap["k3"].total,
                    gap["chi2_token"].total,
                    gap["ratio"].total,
                    gap["ratio"].squares,
                    gap["abs"].count,
                ]
            )
            if len(log_probs):
                peaks = torch.stack([terms.ratio.double().max(), gap["abs"].high, gap["ratio"].high])
                self.maxima = torch.maximum(self.maxima, peaks)

    def _kl(self, moved: MicroBatch, log_probs: Tensor, ratio: Tensor) -> Tensor | None:
        """[M]: the KL of each token to the reference; None without one."""
        config = self.grpo_config
        if self.reference is None:
            return None
        return kl_per_token(
            log_probs,
            self.reference.log_probs(moved, self.temperature),
            estimator=config.kl_estimator,
            log_ratio_clamp=config.log_ratio_clamp,
            clamp=config.kl_clamp,
            k2_gradient=config.kl_k2_gradient,
            ratio=ratio if config.kl_importance_weight else None,
        )

    def _counts(self, batch: StepBatch) -> Totals:
        return Totals(
            num_tokens=batch.num_tokens,
            num_rows=len(batch.experience),
            length=float(self.grpo_config.loss_length or 1),
            num_ranks=self.world_size,
        )

    def _finish(self, batch: StepBatch) -> float:
        learning_rate = self.policy.learning_rate
        norm = self.policy.step()
        totals = dict(zip(_TOTALS, role_sum(self.totals).tolist(), strict=True))
        maxima = role_max(self.maxima).tolist()
        loss, computed = totals.pop("loss"), totals.pop("tokens")
        ratios, squares = totals.pop("ratios"), totals.pop("squared_ratios")
        add = self.counts.add
        # Kish's effective sample size over the number of tokens.
        add("correction/ess", ratios**2, squares * computed)
        if self.reference:
            add("policy/beta", self.beta, 1)
            self._steer(totals["policy/kl"] / max(computed, 1), len(batch.experience))
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


# The order of GRPOConsumer.totals and .maxima.
_TOTALS = (
    "loss",
    "policy/kl",
    "policy/entropy",
    "policy/clip_fraction",
    "policy/ratio_mean",
    "policy/logprob_diff_mean",
    "correction/k1",
    "correction/k3",
    "correction/chi2",
    "ratios",
    "squared_ratios",
    "tokens",
)
_MAXIMA = ("policy/ratio_max", "policy/logprob_diff_max", "correction/ratio_max")
