"""Products with weights by our kernel: exact, the same bits in any company, and in a package that Inductor wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch._inductor
import torch.nn.functional as F
from torch import Tensor, nn

from export.backends import inductor
from export.cpu_kernels import library
from export.cpu_kernels.linear import linear, pack, use_linear
from tests.export.cpu_package import compile_package

SHAPES = [(1, 1), (31, 7), (32, 64), (33, 65), (96, 576), (300, 48)]  # outputs, inputs


def draw(*shape: int, dtype: str) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(getattr(torch, dtype))


@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-5), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
def test_it_is_the_product_and_a_token_has_the_bits_that_it_has_alone(
    num_outputs: int, num_inputs: int, has_bias: bool, dtype: str, error: float
) -> None:
    x, weight = draw(40, num_inputs, dtype=dtype), draw(num_outputs, num_inputs, dtype=dtype) / num_inputs**0.5
    bias = draw(num_outputs, dtype=dtype) if has_bias else None
    packed = pack(weight)
    whole = linear(x, packed, bias, num_outputs)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert whole.dtype == x.dtype and (whole.double() - expected).abs().max() < error
    for start, stop in ((0, 1), (5, 6), (1, 3), (2, 5), (4, 11), (7, 15), (9, 26), (39, 40)):
        assert torch.equal(linear(x[start:stop], packed, bias, num_outputs), whole[start:stop]), (start, stop)
    assert torch.equal(linear(x.view(4, 2, 5, -1), packed, bias, num_outputs).view(40, -1), whole)


def test_sums_are_in_float32_and_rounded_once() -> None:
    x, weight = torch.ones(1, 513).bfloat16(), torch.ones(1, 513).bfloat16()
    weight[0, 0] = 256.0
    assert linear(x, pack(weight), None, 1).item() == 768.0  # in bfloat16 256 + 1 is 256


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_the_number_of_threads_changes_no_bit(num_threads: int) -> None:
    x, weight = draw(11, 576, dtype="bfloat16"), draw(300, 576, dtype="bfloat16")
    expected, before = linear(x, pack(weight), None, 300), torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert torch.equal(linear(x, pack(weight), None, 300), expected)
    finally:
        torch.set_num_threads(before)


class Layer(nn.Module):
    """Products that share an input, with and without biases; one of them with a matrix that is not stored."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(48, n, bias=False, dtype=dtype) for n in (40, 24))
        self.third, self.fourth = (nn.Linear(48, n, dtype=dtype) for n in (16, 8))
        self.last = nn.Linear(40, 48, dtype=dtype)

    def forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        hidden = self.last(self.first(x).relu())
        return hidden, self.second(x), self.third(x), self.fourth(x), F.linear(x, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_package_has_the_kernel_inside_and_gives_its_bits(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layer = Layer(dtype)
    dims = {0: torch.export.Dim("B"), 1: torch.export.Dim("T")}
    x, other = torch.randn(2, 5, 48).to(dtype), torch.randn(4, 48).to(dtype)
    exported = torch.export.export(layer, (x, other), dynamic_shapes=(dims, None))
    use_linear(exported)
    targets = [node.target for node in exported.graph.nodes]
    assert targets.count(torch.ops.hispec.linear_cpu.default) == 3, "one for each input, and for biases or none"
    assert targets.count(torch.ops.aten.linear.default) == 1, "whose weights are not stored"
    package = compile_package(exported, tmp_path, monkeypatch)
    assert inductor.count_kernels(package)["linear"] == 3
    packaged = torch._inductor.aoti_load_package(str(package))

    def expected(x: Tensor) -> list[Tensor]:
        def by_kernel(one: nn.Linear, x: Tensor) -> Tensor:
            return linear(x, pack(one.weight), one.bias, one.out_features)

        hidden = by_kernel(layer.last, by_kernel(layer.first, x).relu())
        return [hidden, *(by_kernel(one, x) for one in (layer.second, layer.third, layer.fourth))]

    with torch.no_grad():
        for shape in ((2, 5, 48), (1, 1, 48), (3, 17, 48)):
            x = torch.randn(shape).to(dtype)
            got = packaged(x, other)
            assert len(got) == 5 and torch.allclose(got[4].float(), layer(x, other)[4].float(), atol=1e-2)
            for mine, wanted in zip(got, expected(x)):
                assert torch.equal(mine, wanted)


def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(RuntimeError, match="false failed at the kernels"):
        library.build_archive(tmp_path)
