"""What holds of the Triton kernel; `test_triton_attention` runs this file, in Triton's interpreter or on a GPU."""

from pathlib import Path

import pytest

from infer.triton_attention import paged_attention
from tests.export import attention_cases as cases
from tests.export.attention_cases import LENGTH, Call
from tests.tiny_engine import DEVICE

QUICK = [(64, 16, 3), (80, 32, 4), (128, 16, 1)]
SHAPES = [
    pytest.param(*shape, marks=[] if shape in QUICK else [pytest.mark.slow])
    for shape in [(head_dim, size, groups) for head_dim in (64, 80, 128) for size in (16, 32) for groups in (1, 3, 4)]
]


@pytest.mark.parametrize(("head_dim", "block_size", "groups"), SHAPES)
def test_it_is_sdpa_and_a_token_has_the_same_bits_for_every_t(head_dim: int, block_size: int, groups: int) -> None:
    lengths = (1, 2, 5, 16, 17) if (head_dim, block_size, groups) in QUICK else range(1, LENGTH)
    call = Call(paged_attention, head_dim, block_size, groups)
    cases.it_is_sdpa_and_a_token_has_the_same_bits_for_every_t(call, 1e-5, lengths)


def test_half_precision_has_the_same_bits_too() -> None:
    # the interpreter multiplies the bits of bf16 as integers
    dtype, error = ("bfloat16", 1e-2) if DEVICE.type == "cuda" else ("float16", 1e-3)
    call = Call(paged_attention, 64, 16, 3, dtype=dtype)
    cases.it_is_sdpa_and_a_token_has_the_same_bits_for_every_t(call, error, (1, 4, 7))


def test_neither_other_rows_nor_a_wider_table_nor_unread_slots_change_a_bit() -> None:
    cases.neither_other_rows_nor_a_wider_table_nor_unread_slots_change_a_bit(paged_attention)


def test_padding_is_finite_and_changes_no_other_token() -> None:
    cases.padding_is_finite_and_changes_no_other_token(paged_attention)


@pytest.mark.parametrize("family", ["llama", "opt", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_a_trunk_exports_with_the_kernel_and_equals_the_portable_form(family: str, tmp_path: Path) -> None:
    cases.a_trunk_exports_with_the_kernel_and_equals_the_portable_form(
        family, "triton", "hispec.paged_attention.default", tmp_path
    )
