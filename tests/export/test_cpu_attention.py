"""The C++ kernel for CPUs: exact, the same bits in any company and with any number of threads, in both dtypes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._inductor

from export.cpu_kernels.attention import paged_attention
from tests.export import attention_cases as cases
from tests.export.attention_cases import LENGTH, PAST, Call
from tests.export.cpu_package import compile_package


@pytest.fixture(params=[1, 2, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-5), ("bfloat16", 1e-2)])
@pytest.mark.parametrize("groups", [1, 3, 4, 7])
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("head_dim", [8, 20, 64, 80, 128])  # 8 and 20 fill no vector
def test_it_is_sdpa_and_a_token_has_the_same_bits_for_every_t(
    head_dim: int, block_size: int, groups: int, dtype: str, error: float
) -> None:
    call = Call(paged_attention, head_dim, block_size, groups, dtype=dtype)
    cases.it_is_sdpa_and_a_token_has_the_same_bits_for_every_t(call, error, range(1, LENGTH))


def test_neither_other_rows_nor_a_wider_table_nor_unread_slots_change_a_bit() -> None:
    cases.neither_other_rows_nor_a_wider_table_nor_unread_slots_change_a_bit(paged_attention)


def test_padding_is_finite_and_changes_no_other_token() -> None:
    cases.padding_is_finite_and_changes_no_other_token(paged_attention)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_threads_and_how_work_is_shared_change_no_bit(num_threads: int, dtype: str) -> None:
    """Few queries: chunks side by side. Many: tokens side by side, each over its chunks in turn."""
    call = Call(paged_attention, 64, 16, 3, batch=8, dtype=dtype)
    whole = call.kernel()
    for row in range(8):
        for token in range(0, LENGTH, 7):
            alone = call.kernel(token, token + 1, rows=slice(row, row + 1))
            assert torch.equal(alone[0, 0], whole[row, token]), (row, token)


@pytest.mark.parametrize("size", [1e-30, 1.0, 60.0, 1e4])
def test_scores_of_any_size_are_weighed_as_by_a_softmax(size: float) -> None:
    call = Call(paged_attention, 64, 16, 3)
    call.query *= size
    assert (call.kernel().double() - call.sdpa()).abs().max() < 1e-4


def test_a_row_s_nan_stays_its_own() -> None:
    call = Call(paged_attention, 64, 16, 3, batch=2)
    whole = call.kernel(0, 4)
    for pages in call.pages:
        pages[call.block_table[0, PAST // 16]] = torch.nan
    got = call.kernel(0, 4)
    assert got[0].isnan().all()
    assert torch.equal(got[1], whole[1])


@pytest.mark.parametrize("family", ["llama", "opt", "qwen3"])
def test_a_trunk_exports_with_the_kernel_and_equals_the_portable_form(family: str, tmp_path: Path) -> None:
    operator = "hispec.paged_attention_cpu.default"
    cases.a_trunk_exports_with_the_kernel_and_equals_the_portable_form(family, "cpp", operator, tmp_path)


def test_a_package_has_the_kernel_inside_and_gives_its_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shim that a package calls takes sizes and pointers from other handles than Python does."""

    class Attend(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
            return paged_attention(*tensors, 0.125)  # type: ignore[arg-type]

    rows, length, blocks, pool = map(torch.export.Dim, ("B", "T", "M", "num_blocks"))
    call = Call(paged_attention, 64, 16, 3, batch=2, dtype="bfloat16")
    shapes = (({0: rows, 1: length}, {0: pool}, {0: pool}, {0: rows, 1: blocks}, {0: rows, 1: length}),)
    tensors = (call.query, *call.pages, call.block_table, call.positions)
    exported = torch.export.export(Attend(), tensors, dynamic_shapes=shapes)
    packaged = torch._inductor.aoti_load_package(str(compile_package(exported, tmp_path, monkeypatch)))
    call.attend = lambda *arguments: packaged(*arguments[:-1])
    inside = [call.kernel(3, 4, rows=slice(0, 1)), call.kernel(5, 20), call.kernel()]
    call.attend = paged_attention
    assert all(map(torch.equal, inside, [call.kernel(3, 4, rows=slice(0, 1)), call.kernel(5, 20), call.kernel()]))
