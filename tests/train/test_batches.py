"""Batches hold every row once; packed rows neither see nor move each other."""

import json

import pytest
import torch
from torch.utils.data import DistributedSampler

from tests.tiny_models import VOCAB_SIZE
from train.batches import bucket, collate, collate_packed, num_tokens, pack, widen
from train.chat import Encoded
from train.data import DistillationDataModule
from train.heads import ExitConfig
from train.model import EarlyExitModel

EXITS = [ExitConfig(name="draft", layer=2, head="layer"), ExitConfig(name="intermediate", layer=4, head="linear")]


def rows_of(lengths, seed=0):
    torch.manual_seed(seed)
    return [Encoded(torch.randint(3, VOCAB_SIZE, (n,)).tolist(), [k > 1 for k in range(n)]) for n in lengths]


def length(row):
    return len(row.token_ids)


def test_buckets_hold_every_row_once_and_rows_of_similar_length():
    rows = rows_of(range(2, 25))
    batches = bucket(rows, 4, seed=0, length=length)
    assert sorted(length(r) for b in batches for r in b) == list(range(2, 25))
    assert all(max(map(length, b)) - min(map(length, b)) < 4 for b in batches)
    mixed = bucket(rows, 4, seed=0)
    assert sorted(length(r) for b in mixed for r in b) == list(range(2, 25))
    assert not all(max(map(length, b)) - min(map(length, b)) < 4 for b in mixed)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_gets_as_many_batches_and_no_row_comes_twice(ranks):
    batches = bucket(rows_of(range(2, 12)), 4, seed=0, length=length, multiple_of=ranks)
    shares = [list(DistributedSampler(batches, ranks, rank, shuffle=True)) for rank in range(ranks)]
    seen = [length(row) for share in shares for n in share for row in batches[n]]
    assert sorted(seen) == list(range(2, 12)) and len({len(share) for share in shares}) == 1


def test_batches_of_one_that_dont_divide_are_told():
    with pytest.warns(UserWarning, match="9 batches of one don't divide among 2 ranks: 1 come twice"):
        batches = bucket(rows_of(range(2, 11)), 1, seed=0, multiple_of=2)
    shares = [list(DistributedSampler(batches, 2, rank)) for rank in range(2)]
    assert sorted(map(len, shares)) == [5, 5] and set(shares[0]) | set(shares[1]) == set(range(9))


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_every_row_comes_once_an_epoch_whatever_the_workers(base_folder, tmp_path, workers, packing):
    """B15."""
    file = tmp_path / "rows.jsonl"
    rows = [{"token_ids": [1] + [10 + n] * (n + 1), "loss_mask": [0] + [1] * (n + 1)} for n in range(10)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DistillationDataModule(
        str(file), str(file), base=str(base_folder), batch_size=3, num_workers=workers, packing=packing, max_length=16
    )
    data.setup("fit")
    loader = data.train_dataloader()
    for _ in range(2):
        labels = torch.cat([batch.token_ids[batch.loss_mask] for batch in loader])
        assert labels.bincount(minlength=20).tolist() == [0] * 10 + list(range(1, 11))


def test_packing_keeps_rows_whole_and_leaves_little_room():
    rows = rows_of([9, 8, 7, 6, 5, 4, 3, 2] * 5)
    sequences = pack(rows, 11, seed=0)
    assert sorted(length(r) for s in sequences for r in s) == sorted(map(length, rows))
    assert all(num_tokens(s) <= 11 for s in sequences)
    assert len(sequences) == 20  # 220 tokens in sequences of 11: not one is wasted


def test_a_packed_rows_first_token_is_no_label_and_padding_is_no_rows():
    first, second = Encoded([5, 6, 7], [True] * 3), Encoded([8, 9], [True] * 2)
    batch = collate_packed([[first, second], [first]])
    assert batch.token_ids.tolist() == [[5, 6, 7, 8, 9], [5, 6, 7, 0, 0]]
    assert batch.loss_mask.tolist() == [[False, True, True, False, True], [False, True, True, False, False]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 0, 0]]
    assert collate([first]).positions is None


@pytest.fixture(params=["llama", "qwen3", "opt", "gemma3"])
def model(request, tiny_model):
    torch.manual_seed(0)
    return EarlyExitModel(tiny_model(request.param), EXITS)


def losses(model, batch):
    """Exit name → KL of each label, in the rows' order."""
    outputs = model(batch.token_ids, batch.positions)
    mask = batch.loss_mask[:, 1:]
    target = model.unembed(outputs.target[:, :-1][mask]).log_softmax(dim=-1)
    found = {}
    for name, states in outputs.exits.items():
        own = model.unembed(states[:, :-1][mask]).log_softmax(dim=-1)
        found[name] = torch.nn.functional.kl_div(own, target, reduction="none", log_target=True).sum(dim=-1)
    return found


def test_packed_rows_have_the_losses_of_rows_alone(model):
    rows = rows_of([7, 5, 9])
    packed = losses(model, collate_packed([rows, rows[:1]]))
    alone = [losses(model, collate([row])) for row in [*rows, rows[0]]]
    for exit_ in EXITS:
        whole = torch.cat([loss[exit_.name] for loss in alone])
        assert float(whole.min()) > 1e-4
        torch.testing.assert_close(packed[exit_.name], whole, atol=1e-5, rtol=1e-5)


def test_a_rows_loss_has_no_gradient_in_another_packed_row(model):
    """Through the base and through the exits' own layers: the embeddings carry the gradient."""
    rows = rows_of([6, 5, 4])
    batch = collate_packed([rows])
    taken = []

    def keep(_, __, out):
        taken.append(out.detach().requires_grad_())
        return taken[-1]

    model.family.decoder.embed_tokens.register_forward_hook(keep)
    outputs = ungraded_forward(model, batch)
    for states in (outputs.target, *outputs.exits.values()):
        (gradient,) = torch.autograd.grad(states[0, 6:11].square().sum(), taken[-1], retain_graph=True)
        touched = gradient[0].abs().sum(dim=-1)
        assert float(touched[:6].max()) == 0 and float(touched[11:].max()) == 0 and bool((touched[6:11] > 0).all())


def ungraded_forward(model, batch):
    """The model's forward with its `no_grad` off, so that gradients reach the embeddings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.model.torch.no_grad", torch.enable_grad)
        return model(batch.token_ids, batch.positions)


@pytest.mark.parametrize("put_together", [collate, lambda rows: collate_packed([rows])])
def test_widening_adds_padding_without_labels_up_to_the_limit(put_together):
    batch = put_together(rows_of([5, 13]))
    width = batch.token_ids.shape[1]
    wide = widen(batch, 40)
    assert wide.token_ids.shape[1] == wide.loss_mask.shape[1] == 32
    assert torch.equal(wide.token_ids[:, :width], batch.token_ids)
    assert torch.equal(wide.loss_mask[:, :width], batch.loss_mask) and not wide.loss_mask[:, width:].any()
    if batch.positions is None:
        assert wide.positions is None
    else:
        assert not wide.positions[:, width:].any() and torch.equal(wide.positions[:, :width], batch.positions)
    assert widen(batch, 20).token_ids.shape[1] == 20
    assert widen(batch, 4).token_ids.shape[1] == width
    assert widen(wide, 100).token_ids.shape[1] == 32
