"""Published algorithms as choices: each preset gives values to those keys of LossConfig that the user left null.

A key that a preset does not name takes DEFAULTS. Weights of KL terms are the papers' where the KL is a term of the
loss; where a paper takes it off the rewards (RLOO, REINFORCE++), set `beta` and `kl_in: reward` yourself.
"""

from __future__ import annotations

from typing import Any

# GRPO's advantages and clip, averaged over all tokens of the step.
DEFAULTS: dict[str, Any] = {
    "loss": "ppo",
    "ratio_level": "token",
    "aggregation": "token_mean",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "beta": 0.0,
    "advantage": "group",
    "scale_rewards": "group",
}

PRESETS: dict[str, dict[str, Any]] = {
    # GRPO: DeepSeekMath (Shao et al., 2024). Each sequence counts the same, however long; KL to the first model.
    "grpo": {
        "aggregation": "sequence_mean",
        "beta": 0.04,
    },
    # DAPO (Yu et al., 2025): clip-higher, every token counts the same, no KL.
    "dapo": {
        "clip_high": 0.28,
    },
    # Dr. GRPO: "Understanding R1-Zero-Like Training" (Liu et al., 2025). Neither the sequence's length nor the group's
    # spread divides.
    "dr_grpo": {
        "aggregation": "fixed_length",
        "scale_rewards": "none",
    },
    # RLOO: "Back to Basics" (Ahmadian et al., 2024). A whole completion is one action of plain REINFORCE.
    "rloo": {
        "loss": "reinforce",
        "aggregation": "sequence_sum",
        "advantage": "rloo",
        "scale_rewards": "none",
    },
    # REINFORCE++ (Hu, 2025): PPO's clip on advantages that are whitened over the batch, whatever the prompt.
    "reinforce_pp": {
        "advantage": "reinforce_pp",
        "scale_rewards": "none",
    },
    # GSPO: "Group Sequence Policy Optimization" (Zheng et al., 2025). The sequence's ratio is clipped, and closely.
    "gspo": {
        "ratio_level": "sequence",
        "aggregation": "sequence_mean",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
    },
    # CISPO: MiniMax-M1 (2025). The ratio is a weight, cut from above alone; no token loses its gradient. The paper
    # names no bound: 5 is that of "The Art of Scaling RL Compute for LLMs" (Khatri et al., 2025).
    "cispo": {
        "loss": "cispo",
        "clip_low": 1.0,
        "clip_high": 4.0,
    },
}
