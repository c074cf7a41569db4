from dataclasses import fields

import pytest
import torch
from torch import Tensor

from rayless.comm.experience import Experience
from rayless.trainers import packing
from rayless.trainers.packing import (
    Layout,
    MicroBatch,
    cheapest_layout,
    deal,
    empty_micro_batch,
    micro_batches,
    prompt_lengths,
)


def batch_of(groups: list[tuple[list[int], list[list[int]]]]) -> Experience:
    """Rows of (prompt, completions) groups; every token of a completion is sampled."""
    rows = [(prompt, completion, group) for group, (prompt, parts) in enumerate(groups) for completion in parts]
    longest = max(len(prompt) + len(completion) for prompt, completion, _ in rows)
    input_ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    for index, (prompt, completion, _) in enumerate(rows):
        stop = len(prompt) + len(completion)
        input_ids[index, :stop] = torch.tensor(prompt + completion)
        mask[index, len(prompt) : stop] = True
    return Experience(
        input_ids=input_ids,
        lengths=torch.tensor([len(prompt) + len(completion) for prompt, completion, _ in rows]),
        mask=mask,
        log_probs=torch.zeros(len(rows), longest),
        versions=torch.zeros(len(rows), longest, dtype=torch.int32),
        rewards=torch.zeros(len(rows)),
        groups=torch.tensor([group for _, _, group in rows]),
    )


def row_groups_of(experience: Experience) -> list[Tensor]:
    return [(experience.groups == group).nonzero().squeeze(1) for group in experience.groups.unique()]


def places(batches: list[MicroBatch]) -> list[tuple[int, int]]:
    return sorted(place for batch in batches for place in zip(batch.rows.tolist(), batch.columns.tolist(), strict=True))


TWO_ANSWERS = [([5, 6], [[7, 8, 9], [3]])]


def test_a_shared_prefix_line_is_the_prompt_and_then_each_completion() -> None:
    experience = batch_of(TWO_ANSWERS)
    (batch,) = micro_batches(experience, row_groups_of(experience), layout="shared_prefix", max_tokens=100)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9, 3]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 2]]
    # Both first tokens are predicted by the prompt's last token, at place 1.
    assert batch.predict.tolist() == [1, 2, 3, 1]
    assert batch.targets.tolist() == [7, 8, 9, 3]
    assert batch.rows.tolist() == [0, 0, 0, 1]
    assert batch.columns.tolist() == [2, 3, 4, 2]
    assert batch.attention_mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 1, 0, 0, 0, 1],
    ]


def test_padded_places_see_themselves_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "LINE_PLACES", 6)
    experience = batch_of([*TWO_ANSWERS, ([4], [[2], [2]])])
    (batch,) = micro_batches(experience, row_groups_of(experience), layout="shared_prefix", max_tokens=100)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9, 3], [4, 2, 2, 0, 0, 0]]
    assert batch.attention_mask.shape == (2, 1, 6, 6)
    assert batch.attention_mask[1, 0, 3:].int().tolist() == [[0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 1]]
    assert batch.predict.tolist() == [1, 2, 3, 1, 6, 6]


def test_documents_of_one_line_are_blind_to_each_other() -> None:
    experience = batch_of([*TWO_ANSWERS, ([4], [[2], [2]])])
    (batch,) = micro_batches(experience, row_groups_of(experience), layout="shared_prefix", max_tokens=100)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9, 3, 4, 2, 2]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 2, 0, 1, 1]]
    assert batch.predict.tolist() == [1, 2, 3, 1, 6, 6]
    assert batch.attention_mask[0, 0, 6:].int().tolist() == [
        [0, 0, 0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 1, 0, 1],
    ]


def test_a_packed_line_is_rows_without_padding() -> None:
    experience = batch_of(TWO_ANSWERS)
    (batch,) = micro_batches(experience, row_groups_of(experience), layout="packed", max_tokens=100)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9, 5, 6, 3]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert batch.predict.tolist() == [1, 2, 3, 6]
    assert batch.attention_mask[0, 0, 5:].int().tolist() == [
        [0, 0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1, 1, 1],
    ]


def even_groups(prompt: int, completions: list[int]) -> Experience:
    """Four groups of one prompt length and completions of these lengths."""
    return batch_of([([1] * prompt, [[2] * length for length in completions]) for _ in range(4)])


@pytest.mark.parametrize(
    ("prompt", "completions", "layout"),
    [(200, [20] * 16, "shared_prefix"), (4, [500] * 4, "padded"), (16, [8, 40, 90, 120] * 4, "packed")],
)
def test_the_cheapest_layout_follows_from_lengths(prompt: int, completions: list[int], layout: Layout) -> None:
    experience = even_groups(prompt, completions)
    chosen = cheapest_layout(experience, row_groups_of(experience), max_tokens=16384, hidden_size=576)
    assert chosen == layout


def test_a_padded_line_is_one_row() -> None:
    experience = batch_of(TWO_ANSWERS)
    (batch,) = micro_batches(experience, row_groups_of(experience), layout="padded", max_tokens=100)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9], [5, 6, 3, 0, 0]]
    assert batch.attention_mask.int().tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert batch.predict.tolist() == [1, 2, 3, 6]
    assert batch.targets.tolist() == [7, 8, 9, 3]


@pytest.mark.parametrize("layout", ["shared_prefix", "packed", "padded"])
def test_tokens_that_were_not_sampled_are_read_but_are_no_targets(layout: Layout) -> None:
    experience = batch_of([([5, 6], [[7, 8, 9, 4], [3, 2]])])
    experience.mask[0, 3] = False  # token 8 came from a tool
    experience.mask[1, 2] = False  # left out of the loss, though it is the completion's first
    (batch,) = micro_batches(experience, row_groups_of(experience), layout=layout, max_tokens=100)
    assert batch.targets.tolist() == [7, 9, 4, 2]
    assert batch.columns.tolist() == [2, 4, 5, 3]
    assert batch.input_ids.flatten()[batch.predict].tolist() == [6, 8, 9, 3]
    assert 8 in batch.input_ids


@pytest.mark.parametrize("layout", ["shared_prefix", "packed", "padded"])
def test_rows_without_sampled_tokens_contribute_nothing(layout: Layout) -> None:
    experience = batch_of([*TWO_ANSWERS, ([4], [[2], [2]])])
    experience.mask[0] = False
    experience.mask[2:] = False
    assert prompt_lengths(experience).tolist() == [5, 2, 5, 5]
    (batch,) = micro_batches(experience, row_groups_of(experience), layout=layout, max_tokens=100)
    assert batch.input_ids.tolist() == [[5, 6, 3]]
    assert places([batch]) == [(1, 2)]
    experience.mask[1] = False
    assert micro_batches(experience, row_groups_of(experience), layout=layout, max_tokens=100) == []


def many_groups() -> Experience:
    generator = torch.Generator().manual_seed(0)

    def tokens(low: int, high: int) -> list[int]:
        count = int(torch.randint(low, high, (), generator=generator))
        return torch.randint(1, 100, (count,), generator=generator).tolist()

    return batch_of([(tokens(2, 9), [tokens(1, 20) for _ in range(4)]) for _ in range(6)])


@pytest.mark.parametrize("layout", ["shared_prefix", "packed", "padded"])
@pytest.mark.parametrize("max_tokens", [28, 40, 64, 1000])
def test_every_sampled_token_is_a_target_once_and_the_budget_holds(layout: Layout, max_tokens: int) -> None:
    experience = many_groups()
    batches = micro_batches(experience, row_groups_of(experience), layout=layout, max_tokens=max_tokens)
    assert all(batch.input_ids.numel() <= max_tokens for batch in batches)
    assert places(batches) == [tuple(place) for place in experience.mask.nonzero().tolist()]
    for batch in batches:
        assert torch.equal(batch.targets, experience.input_ids[batch.rows, batch.columns])
        before = experience.input_ids[batch.rows, batch.columns - 1]
        assert torch.equal(batch.input_ids.flatten()[batch.predict], before)
        assert torch.equal(batch.position_ids.flatten()[batch.predict], batch.columns - 1)


def test_a_group_over_the_budget_is_split_and_its_prompt_repeated() -> None:
    experience = batch_of([([5, 6, 7], [[1, 1], [2, 2], [3, 3]])])
    batches = micro_batches(experience, row_groups_of(experience), layout="shared_prefix", max_tokens=7)
    assert [batch.input_ids.tolist() for batch in batches] == [[[5, 6, 7, 1, 1, 2, 2]], [[5, 6, 7, 3, 3]]]


def test_a_row_over_the_budget_stands_alone() -> None:
    experience = batch_of([([5, 6], [[1, 1, 1, 1], [2]])])
    batches = micro_batches(experience, row_groups_of(experience), layout="shared_prefix", max_tokens=4)
    assert [batch.input_ids.tolist() for batch in batches] == [[[5, 6, 1, 1, 1, 1]], [[5, 6, 2]]]


def test_rows_of_one_group_with_different_prompts_are_our_mistake() -> None:
    experience = batch_of([([5, 6], [[1], [2]])])
    experience.input_ids[1, 0] = 4
    with pytest.raises(AssertionError, match="prompts differ"):
        micro_batches(experience, row_groups_of(experience), layout="shared_prefix", max_tokens=100)


def test_micro_batches_move_as_a_whole() -> None:
    experience = batch_of(TWO_ANSWERS)
    (batch,) = micro_batches(experience, row_groups_of(experience), layout="packed", max_tokens=100)
    moved = batch.to("meta")
    assert all(getattr(moved, field.name).device.type == "meta" for field in fields(moved))
    assert moved.attention_mask.device.type == "meta"
    assert empty_micro_batch().to("meta").segments is None


def test_groups_are_dealt_evenly_in_number_and_balanced_in_cost() -> None:
    # 9 | 7, then 5 to the lighter, 3 to the lighter: 9 + 3 = 7 + 5.
    assert deal([3, 9, 5, 7], 2) == [[0, 1], [2, 3]]
    # 10 fills the first rank's load, but each rank takes two all the same.
    assert deal([10, 1, 1, 1], 2) == [[0, 3], [1, 2]]
    assert deal([4, 4, 4], 3) == [[0], [1], [2]]
    assert deal([1, 2], 1) == [[0, 1]]
    assert deal([], 2) == [[], []]
    with pytest.raises(AssertionError, match="evenly"):
        deal([1, 2, 3], 2)
