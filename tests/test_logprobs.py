import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_packing import batch_of, row_groups_of
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from rayless.comm.experience import Experience
from rayless.trainers import logprobs, packing
from rayless.trainers.aggregation import Totals, token_weights, total_loss
from rayless.trainers.logprobs import LogProbModel, log_probs_and_entropy
from rayless.trainers.loss_config import LossConfig
from rayless.trainers.losses import Tokens, policy_terms
from rayless.trainers.packing import Layout, MicroBatch, empty_micro_batch, micro_batches

TINY = Path(__file__).parents[1] / "models/tiny"
VOCABULARY = 49152
CASES = [json.loads(line) for line in (Path(__file__).parent / "cases/logprob_cases.jsonl").open()]


def clipped_terms(log_probs: Tensor, old: Tensor, advantages: Tensor, *, clip_high: float) -> Tensor:
    """The PPO loss of each token."""
    rows = torch.zeros(len(log_probs), dtype=torch.int64)
    tokens = Tokens(log_probs=log_probs, old_log_probs=old, advantages=advantages, rows=rows, num_rows=1)
    return policy_terms(tokens, LossConfig(clip_high=clip_high)).loss


def load_tiny(dtype: torch.dtype) -> LogProbModel:
    torch.set_num_threads(1)
    return LogProbModel(AutoModelForCausalLM.from_pretrained(TINY, dtype=dtype, attn_implementation="sdpa"))


@pytest.fixture(scope="module")
def shared_model() -> LogProbModel:
    return load_tiny(torch.float32)


@pytest.fixture
def model(shared_model: LogProbModel) -> LogProbModel:
    shared_model.zero_grad(set_to_none=True)
    return shared_model


def random_batch(lengths: list[list[int]], *, prompts: list[int], seed: int = 0) -> Experience:
    """One group for each list of completion lengths, with a prompt of so many tokens."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()

    return batch_of(
        [(tokens(prompt), [tokens(n) for n in group]) for prompt, group in zip(prompts, lengths, strict=True)]
    )


def score(model: torch.nn.Module, batch: MicroBatch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    return model(batch.input_ids, batch.position_ids, batch.attention_mask, batch.predict, batch.targets, temperature)


def on_rows(model: LogProbModel, experience: Experience, layout: Layout, max_tokens: int, temperature: float) -> Tensor:
    """[B, T] log-probs, 0 where nothing was sampled."""
    out = torch.zeros_like(experience.log_probs)
    for batch in micro_batches(experience, row_groups_of(experience), layout=layout, max_tokens=max_tokens):
        out[batch.rows, batch.columns] = score(model, batch, temperature)[0]
    return out


def naive(model: LogProbModel, experience: Experience, temperature: float) -> Tensor:
    """[B, T]: each row alone through the whole model, all logits at once, nothing packed or padded."""
    out = torch.zeros_like(experience.log_probs)
    for row, length in enumerate(experience.lengths.tolist()):
        ids = experience.input_ids[row, :length]
        all_log_probs = torch.log_softmax(model.model(ids[None], use_cache=False).logits[0] / temperature, dim=-1)
        out[row, 1:length] = all_log_probs[torch.arange(length - 1), ids[1:]]
    return torch.where(experience.mask, out, 0.0)


def gradients(model: torch.nn.Module) -> Tensor:
    """All gradients in one vector, taken away from the model."""
    taken = []
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        taken.append(parameter.grad.flatten().clone())
    model.zero_grad(set_to_none=True)
    return torch.cat(taken)


def assert_same_direction(got: Tensor, expected: Tensor, tolerance: float) -> None:
    assert expected.norm() > 0
    assert (got - expected).norm() <= tolerance * expected.norm()


MIXED: dict[str, Any] = {"lengths": [[3, 9, 1, 5], [12, 12], [1, 1, 7]], "prompts": [11, 4, 1]}


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_log_probs_match_the_case_file(case: dict[str, Any]) -> None:
    logits, target = torch.tensor([case["logits"]]), torch.tensor([case["sampled_index"]])
    log_probs, _ = log_probs_and_entropy(logits, target, case["temperature"])
    assert log_probs.item() == pytest.approx(case["expected_logprob"], abs=1e-5)


def test_the_entropy_of_equal_logits_is_the_log_of_their_number() -> None:
    _, entropy = log_probs_and_entropy(torch.zeros(2, 64), torch.tensor([0, 63]), 0.7)
    torch.testing.assert_close(entropy, torch.full((2,), math.log(64)))


def test_the_entropy_follows_the_temperature_and_survives_certainty() -> None:
    # Logits ln 3 and 0: probabilities 3/4 and 1/4 at temperature 1, 9/10 and 1/10 at one half.
    logits = torch.tensor([[math.log(3), 0.0]])
    for temperature, probability in ((1.0, 0.75), (0.5, 0.9)):
        expected = -probability * math.log(probability) - (1 - probability) * math.log(1 - probability)
        _, entropy = log_probs_and_entropy(logits, torch.tensor([0]), temperature)
        assert entropy.item() == pytest.approx(expected, abs=1e-6)
    _, entropy = log_probs_and_entropy(torch.tensor([[0.0, -torch.inf, -1e5]]), torch.tensor([0]), 1.0)
    assert entropy.item() == 0.0


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
@pytest.mark.parametrize("layout", ["shared_prefix", "packed", "padded"])
def test_packed_log_probs_equal_each_row_alone(model: LogProbModel, layout: Layout, temperature: float) -> None:
    experience = random_batch(**MIXED)
    with torch.no_grad():
        expected = naive(model, experience, temperature)
        # 19 tokens split the first group, 60 put several groups into one micro-batch, 1000 everything.
        for max_tokens in (19, 60, 1000):
            got = on_rows(model, experience, layout, max_tokens, temperature)
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_packed_gradients_equal_each_row_alone(model: LogProbModel) -> None:
    experience = random_batch(**MIXED)
    weights = torch.randn(experience.mask.shape, generator=torch.Generator().manual_seed(1))
    (naive(model, experience, 0.6) * weights).sum().backward()
    expected = gradients(model)
    layouts: tuple[Layout, ...] = ("shared_prefix", "packed", "padded")
    for layout in layouts:
        (on_rows(model, experience, layout, 60, 0.6) * weights).sum().backward()
        assert_same_direction(gradients(model), expected, 1e-5)


def test_each_target_is_predicted_by_the_token_before_it(model: LogProbModel) -> None:
    experience = batch_of([([50, 60, 70], [[80, 90]])])
    (batch,) = micro_batches(experience, [torch.tensor([0])], layout="shared_prefix", max_tokens=8)
    with torch.no_grad():
        log_probs, entropy = score(model, batch)
        all_log_probs = torch.log_softmax(model.model(torch.tensor([[50, 60, 70, 80, 90]])).logits[0], dim=-1)
    torch.testing.assert_close(log_probs, torch.stack([all_log_probs[2, 80], all_log_probs[3, 90]]))
    torch.testing.assert_close(entropy, -(all_log_probs.exp() * all_log_probs).sum(dim=-1)[2:4])


@pytest.mark.parametrize("layout", ["shared_prefix", "packed", "padded"])
def test_poison_in_padded_places_changes_nothing(
    model: LogProbModel, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "LINE_PLACES", 1)  # a line each, so that there is padding
    experience = random_batch(**MIXED)
    beyond = torch.arange(experience.input_ids.shape[1]) >= experience.lengths[:, None]
    poisoned = replace(
        experience,
        input_ids=experience.input_ids.masked_fill(beyond, -100),
        log_probs=experience.log_probs.masked_fill(~experience.mask, torch.nan),
    )
    outcomes = []
    for each in (experience, poisoned):
        (batch,) = micro_batches(each, row_groups_of(each), layout=layout, max_tokens=1000)
        log_probs, _ = score(model, batch)
        old = each.log_probs[batch.rows, batch.columns] - 4.0
        clipped_terms(log_probs, old, torch.ones_like(old), clip_high=1e9).sum().backward()
        outcomes.append((log_probs.detach(), gradients(model)))
    assert all(torch.equal(clean, dirty) for clean, dirty in zip(*outcomes, strict=True))

    # And the other way round: other tokens in the micro-batch's own padded places.
    padding = batch.input_ids == 0
    refilled = replace(batch, input_ids=batch.input_ids.masked_fill(padding, VOCABULARY - 1))
    log_probs, _ = score(model, refilled)
    log_probs.sum().backward()
    first = gradients(model)
    score(model, batch)[0].sum().backward()
    assert padding.any()
    torch.testing.assert_close(log_probs.detach(), outcomes[0][0], atol=1e-6, rtol=0)
    assert_same_direction(first, gradients(model), 1e-6)


def test_chunks_change_neither_values_nor_gradients(model: LogProbModel, monkeypatch: pytest.MonkeyPatch) -> None:
    experience = random_batch(**MIXED)
    (batch,) = micro_batches(experience, row_groups_of(experience), layout="shared_prefix", max_tokens=1000)
    whole, whole_entropy = score(model, batch, 0.6)
    whole.square().sum().backward()
    expected = gradients(model)
    for chunk in (7, len(batch.targets) - 1):
        monkeypatch.setattr(logprobs, "CHUNK_LOGITS", chunk * VOCABULARY)
        log_probs, entropy = score(model, batch, 0.6)
        assert log_probs.requires_grad
        assert not entropy.requires_grad
        log_probs.square().sum().backward()
        torch.testing.assert_close(log_probs, whole)
        torch.testing.assert_close(entropy, whole_entropy)
        assert_same_direction(gradients(model), expected, 1e-6)


def test_no_more_logits_than_one_chunk_exist_or_are_kept(model: LogProbModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", 7 * VOCABULARY)
    experience = random_batch(**MIXED)
    (batch,) = micro_batches(experience, row_groups_of(experience), layout="shared_prefix", max_tokens=1000)
    sizes: list[int] = []
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    watch = model.model.lm_head.register_forward_hook(lambda module, inputs, output: sizes.append(len(output)))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        log_probs, _ = score(model, batch)
    assert len(batch.targets) == 51
    assert sizes == [7] * 7 + [2]
    assert not any(tensor.shape[-1:] == (VOCABULARY,) for tensor in kept)
    log_probs.sum().backward()
    watch.remove()
    assert max(sizes) == 7


@pytest.fixture
def one_rank_world(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank_world")
def test_chunks_and_empty_micro_batches_work_under_data_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", 10 * VOCABULARY)
    model = load_tiny(torch.float32)
    experience = random_batch(**MIXED)
    batches = micro_batches(experience, row_groups_of(experience), layout="shared_prefix", max_tokens=40)
    assert len(batches[0].targets) > 10
    parallel = DistributedDataParallel(model)
    found = []
    for module in (model, parallel):
        for batch in [*batches, empty_micro_batch()]:
            score(module, batch)[0].square().sum().backward()
        found.append(gradients(model))
    assert_same_direction(found[1], found[0], 1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_no_targets_give_every_parameter_a_gradient_of_zeros(tied: bool) -> None:
    model = load_tiny(torch.float32)
    if not tied:
        model.model.lm_head.weight = torch.nn.Parameter(model.model.lm_head.weight.detach().clone())
    log_probs, entropy = score(model, empty_micro_batch())
    assert log_probs.shape == entropy.shape == (0,)
    weights = token_weights(torch.zeros(0, dtype=torch.int64), 0, "token_mean", Totals(num_tokens=7, num_rows=0))
    total_loss(log_probs, weights).backward()
    assert len(list(model.parameters())) == (46 if tied else 47)
    assert gradients(model).eq(0).all()


def test_autocast_does_not_reach_the_head(model: LogProbModel) -> None:
    experience = random_batch([[5, 5]], prompts=[6])
    (batch,) = micro_batches(experience, row_groups_of(experience), layout="padded", max_tokens=100)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        log_probs, _ = score(model, batch)
        hidden = model.model.model(batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
    logits = hidden.flatten(0, 1)[batch.predict].float() @ model.model.lm_head.weight.T
    expected = torch.log_softmax(logits, dim=-1).gather(1, batch.targets[:, None]).squeeze(1)
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=0)


def test_a_bf16_model_gives_float32_log_probs(model: LogProbModel) -> None:
    experience = random_batch([[5, 5]], prompts=[6])
    (batch,) = micro_batches(experience, row_groups_of(experience), layout="padded", max_tokens=100)
    log_probs, entropy = score(load_tiny(torch.bfloat16), batch)
    assert log_probs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(log_probs, score(model, batch)[0], atol=5e-2, rtol=0)


def test_the_gradient_does_not_depend_on_how_rows_are_dealt_out(model: LogProbModel) -> None:
    experience = random_batch([[1, 1, 1, 1, 12, 12, 12, 12]], prompts=[5])
    advantages = torch.tensor([1.0, -1.0, 0.5, 2.0, -0.3, 0.7, -1.2, 0.1])
    tokens = int(experience.mask.sum())
    assert tokens == 52
    with torch.no_grad():
        old = naive(model, experience, 1.0)

    def gradient(ranks: list[list[Tensor]], layout: Layout, max_tokens: int) -> Tensor:
        """The gradient after the plugin's mean over ranks; each rank has its own groups of rows."""
        parts = []
        for row_groups in ranks:
            for batch in micro_batches(experience, row_groups, layout=layout, max_tokens=max_tokens):
                log_probs, _ = score(model, batch)
                known = old[batch.rows, batch.columns]
                terms = clipped_terms(log_probs, known, advantages[batch.rows], clip_high=0.28)
                totals = Totals(num_tokens=tokens, num_rows=8, num_ranks=len(ranks))
                total_loss(terms, token_weights(batch.rows, 8, "token_mean", totals)).backward()
            parts.append(gradients(model))
        return torch.stack(parts).mean(dim=0)

    everything, pairs = torch.arange(8), list(torch.arange(8).split(2))
    expected = gradient([[everything]], "shared_prefix", 1000)
    assert expected.norm() > 0.01
    splits: list[tuple[list[list[Tensor]], Layout, int]] = [
        ([pairs], "shared_prefix", 1),
        ([pairs], "shared_prefix", 29),
        ([[everything]], "padded", 40),
        ([pairs[:1], pairs[1:]], "shared_prefix", 1000),
        ([pairs[2:], pairs[:2]], "padded", 1),
    ]
    for ranks, layout, max_tokens in splits:
        difference = gradient(ranks, layout, max_tokens) - expected
        assert difference.abs().max() <= 1e-6


def test_a_mask_of_who_may_look_where_needs_sdpa(model: LogProbModel) -> None:
    experience = random_batch([[2, 2]], prompts=[3])
    (batch,) = micro_batches(experience, row_groups_of(experience), layout="shared_prefix", max_tokens=100)
    model.model.set_attn_implementation("eager")
    with pytest.raises(AssertionError, match="needs sdpa"):
        score(model, batch)
    model.model.set_attn_implementation("sdpa")
