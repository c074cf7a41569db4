"""Log-probs of given tokens under a causal language model, without ever holding all logits.

R lines of N tokens go through the layers; only the M positions that predict a sampled token see the LM head. H hidden
size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

# Logits that exist at the same time, 128 MiB of them in float32.
CHUNK_LOGITS = 2**25


def log_probs_and_entropy(
    logits: Tensor, targets: Tensor, temperature: float, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target ([M] int64) and entropy in nats under softmax(logits / temperature); logits are [M, V].

    Both are [M] float32, whatever the logits' type. The entropy carries a gradient only with `entropy_gradient`, which
    keeps two more [M, V] for backward.
    """
    logits = logits.float() if temperature == 1 else logits.float() / temperature
    all_log_probs = torch.log_softmax(logits, dim=-1)  # [M, V]
    log_probs = all_log_probs.gather(-1, targets[:, None]).squeeze(-1)
    if entropy_gradient:
        probs = all_log_probs.exp()
        # A token that cannot come has log-prob -inf, and 0 * inf is no number.
        return log_probs, -(probs * all_log_probs.masked_fill(probs == 0, 0.0)).sum(dim=-1)
    # Last, because a checkpoint's second run stops at the last value that backward needs: the entropy is paid for once.
    entropy = torch.special.entr(all_log_probs.detach().exp()).sum(dim=-1)
    return log_probs, entropy


class LogProbModel(nn.Module):
    """A causal language model whose forward gives log-probs: the module to wrap for data-parallel training.

    The head has to run inside this forward: a data-parallel wrapper prepares gradients for its own forward alone.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor,
        predict: Tensor,
        targets: Tensor,
        temperature: float,
        *,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies ([M] float32 each) of `targets` ([M]) under softmax(logits / temperature).

        The entropies carry a gradient only with `entropy_gradient`.

        `input_ids` and `position_ids` are [R, N]; `attention_mask` is [R, N] for ordinary causal lines or [R, 1, N, N]
        bool, True where a token may look. `predict` ([M]) are the places in R*N whose hidden states predict the
        targets. With M = 0 the results are empty, and backward through their sum gives every parameter zeros.
        """
        assert attention_mask.dim() == 2 or self.model.config._attn_implementation == "sdpa", (
            "a mask of who may look where needs sdpa: other attentions refuse it or add it to the scores"
        )
        lines = self.model.get_decoder()(
            input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask, use_cache=False
        )
        hidden = lines.last_hidden_state.flatten(0, 1)[predict]  # [M, H]
        head = self.model.get_output_embeddings()
        return head_log_probs(head, hidden, targets, temperature, entropy_gradient=entropy_gradient)


def head_log_probs(
    head: nn.Linear, hidden: Tensor, targets: Tensor, temperature: float, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies ([M] float32 each) of `targets` ([M]) after the LM head's logits of `hidden` ([M, H]).

    Logits of a chunk of tokens exist at a time, in forward and backward.
    """
    tokens = max(1, CHUNK_LOGITS // head.weight.shape[0])
    chunks = list(zip(hidden.split(tokens), targets.split(tokens), strict=True))
    if len(chunks) == 1:
        return _score(head, hidden, targets, temperature, entropy_gradient)
    # Backward computes each chunk's logits again instead of keeping them all; nothing in there is random.
    scored = [
        checkpoint(_score, head, *chunk, temperature, entropy_gradient, use_reentrant=False, preserve_rng_state=False)
        for chunk in chunks
    ]
    log_probs, entropy = zip(*scored, strict=True)
    return torch.cat(log_probs), torch.cat(entropy)


def _score(
    head: nn.Linear, hidden: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    # Autocast would round float32 weights and logits to bf16, an error of percents in the ratio. A head whose weights
    # are bf16 multiplies in bf16 all the same: the sampler's head rounds its logits just so, and a float32 copy of the
    # weights would cost 4*V*H bytes. The division and the softmax are float32 either way.
    with torch.autocast(hidden.device.type, enabled=False):
        logits = head(hidden.to(head.weight.dtype))
        return log_probs_and_entropy(logits, targets, temperature, entropy_gradient=entropy_gradient)
