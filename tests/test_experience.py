import pytest
import torch
from torch import Tensor

from rayless.comm.experience import Experience, concat, empty, num_bytes, pack, unpack

PROMPT = 2  # tokens of every prompt in these tests


def some_experience(lengths: list[int], *, group: int = 1) -> Experience:
    """One group; row r holds the ids group * 1000 + r * 100 + place. Every field is 0 in the padding."""
    longest = max(lengths, default=0)
    places, rows = torch.arange(longest)[None], torch.arange(len(lengths))[:, None]  # [1, T], [B, 1]
    real = places < torch.tensor(lengths, dtype=torch.int64)[:, None]  # [B, T]
    mask = real & (places >= PROMPT)
    return Experience(
        input_ids=torch.where(real, group * 1000 + rows * 100 + places, 0),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        mask=mask,
        log_probs=torch.where(mask, -(rows + places) / 8, 0.0),
        versions=torch.where(mask, group + places % 2, 0).to(torch.int32),
        rewards=torch.arange(len(lengths)) + 0.5,
        groups=torch.full((len(lengths),), group),
    )


def assert_same(got: Experience, expected: Experience) -> None:
    """Every field has the same dtype, shape and bits."""
    for name in Experience.__slots__:
        torch.testing.assert_close(getattr(got, name), getattr(expected, name), rtol=0, atol=0)


def through_the_wire(experience: Experience) -> Experience:
    wire = pack(experience)
    assert wire.dtype == torch.uint8
    return unpack(wire, num_rows=len(experience), num_tokens=int(experience.lengths.sum()))


@pytest.mark.parametrize(
    "lengths",
    [
        [5],
        [3, 9, 4, 9],
        [2, 2, 2],  # no row has a completion
        [7, 2, 3],  # the second row has none
        [1, 6],  # a prompt of one token
        [],
    ],
)
def test_what_is_packed_comes_out_bit_for_bit(lengths: list[int]) -> None:
    experience = some_experience(lengths, group=7)
    assert_same(through_the_wire(experience), experience)


def test_ids_groups_and_versions_keep_their_range() -> None:
    experience = some_experience([3])
    experience.input_ids[0, 2], experience.versions[0, 2] = 2**31 - 1, 2**31 - 1
    experience.groups[0], experience.rewards[0] = 2**62, float("-inf")
    assert_same(through_the_wire(experience), experience)


def test_columns_that_are_padding_in_every_row_are_cut() -> None:
    experience = some_experience([3, 5])
    columns = {name: getattr(experience, name) for name in Experience.__slots__}
    wider = {
        name: torch.nn.functional.pad(column, (0, 4)) if column.dim() == 2 else column
        for name, column in columns.items()
    }
    assert_same(through_the_wire(Experience(**wider)), experience)


def test_the_wire_holds_20_bytes_a_row_and_13_a_real_token() -> None:
    # Row: length 8, group 8, reward 4. Token: id 4, log-prob 4, version 4, mask 1. Padding: none.
    assert num_bytes(num_rows=2, num_tokens=5) == 2 * 20 + 5 * 13
    assert len(pack(some_experience([2, 3]))) == 105
    assert len(pack(some_experience([1, 100]))) == 40 + 101 * 13
    assert len(pack(empty())) == num_bytes(0, 0) == 0


def test_what_stands_in_the_padding_does_not_cross() -> None:
    clean, dirty = some_experience([2, 4, 3]), some_experience([2, 4, 3])
    padding = torch.arange(4)[None] >= dirty.lengths[:, None]
    for field, junk in ((dirty.input_ids, -1), (dirty.mask, True), (dirty.log_probs, torch.nan), (dirty.versions, 9)):
        field[padding] = junk
    assert torch.equal(pack(dirty), pack(clean))
    assert_same(through_the_wire(dirty), clean)


def test_a_header_that_does_not_fit_the_buffer_is_noticed() -> None:
    wire = pack(some_experience([2, 3]))
    with pytest.raises(AssertionError, match="header and its length disagree"):
        unpack(wire, num_rows=2, num_tokens=6)


def test_the_unpacked_batch_does_not_read_the_buffer_again() -> None:
    wire = pack(some_experience([3, 4]))
    experience = unpack(wire, num_rows=2, num_tokens=7)
    wire.fill_(255)
    assert_same(experience, some_experience([3, 4]))


def test_a_batch_of_nothing_has_no_rows_and_no_columns() -> None:
    assert len(empty()) == 0
    assert empty().input_ids.shape == (0, 0)
    assert_same(empty(), some_experience([]))


def test_concat_pads_to_the_longest_and_keeps_the_order() -> None:
    joined = concat([some_experience([3, 2], group=1), some_experience([5], group=2), some_experience([4], group=3)])
    assert joined.input_ids.tolist() == [
        [1000, 1001, 1002, 0, 0],
        [1100, 1101, 0, 0, 0],
        [2000, 2001, 2002, 2003, 2004],
        [3000, 3001, 3002, 3003, 0],
    ]
    assert joined.lengths.tolist() == [3, 2, 5, 4]
    assert joined.groups.tolist() == [1, 1, 2, 3]
    assert joined.rewards.tolist() == [0.5, 1.5, 0.5, 0.5]
    assert joined.mask.sum(dim=1).tolist() == [1, 0, 3, 2]
    assert joined.versions[2].tolist() == [0, 0, 2, 3, 2]
    assert joined.log_probs[3].tolist() == [0, 0, -0.25, -0.375, 0]


def test_concat_welcomes_batches_without_rows() -> None:
    batch = some_experience([4, 2])
    assert_same(concat([empty(), batch, empty()]), batch)
    assert_same(concat([empty(), empty()]), empty())


def test_split_is_the_inverse_of_concat() -> None:
    parts = [some_experience([3, 2], group=1), empty(), some_experience([5], group=2), some_experience([2, 4], group=3)]
    for got, expected in zip(concat(parts).split([2, 0, 1, 2]), parts, strict=True):
        assert_same(got, expected)


def test_split_takes_every_row() -> None:
    with pytest.raises(AssertionError, match="sizes add up to 2, the batch holds 3 rows"):
        some_experience([2, 3, 4]).split([1, 1])


@pytest.mark.parametrize(
    ("index", "first_ids", "longest"),
    [
        (torch.tensor([2, 0]), [1200, 1000], 4),
        (torch.tensor([1, 1]), [1100, 1100], 6),
        (torch.tensor([True, False, True]), [1000, 1200], 4),
        (torch.tensor([False, False, False]), [], 0),
    ],
)
def test_picked_rows_are_trimmed_to_the_longest_of_them(index: Tensor, first_ids: list[int], longest: int) -> None:
    picked = some_experience([3, 6, 4]).rows(index)
    assert picked.input_ids[:, :1].flatten().tolist() == first_ids
    for name in ("input_ids", "mask", "log_probs", "versions"):
        assert getattr(picked, name).shape == (len(first_ids), longest)
    assert len(picked) == len(picked.rewards) == len(picked.groups) == len(first_ids)


def test_to_moves_every_tensor() -> None:
    moved = some_experience([3, 2]).to("meta")
    assert {getattr(moved, name).device.type for name in Experience.__slots__} == {"meta"}
