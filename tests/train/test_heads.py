"""Exits from plain mappings, as `export --config` and exits.json give them."""

import pytest

from train.heads import ExitConfig, exit_configs
from train.losses import ExitLoss


def test_an_exits_loss_is_read_and_makes_no_difference_to_what_the_exit_is():
    (exit_,) = exit_configs([{"name": "draft", "layer": 2, "head": "native", "loss": {"kl": 1, "tv": 0.5}}])
    assert exit_.loss == ExitLoss(kl=1, tv=0.5)
    assert exit_ == ExitConfig(name="draft", layer=2, head="native")


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"name": "draft"}, r"exits\[0\]: missing key 'layer'"),
        ({"name": "draft", "layer": 2, "depth": 1}, r"exits\[0\]: unknown key 'depth'.*head, layer"),
        ({"name": "draft", "layer": 2, "loss": {"kll": 1}}, r"exits\[0\]\.loss: unknown key 'kll'.*topk_kl"),
    ],
)
def test_keys_that_are_missing_or_unknown_are_named(record, reason):
    with pytest.raises(ValueError, match=reason):
        exit_configs([record])
