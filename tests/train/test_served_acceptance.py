"""What validation counts on a text is what the engine counts while it writes that text."""

import pytest
import torch

from infer.params import SamplingParams
from infer.strategy import Policy
from tests.tiny_engine import PROMPTS, Tiny, make_model
from train.batches import collate
from train.counting import answered
from train.figures import Figures
from train.heads import ExitConfig
from train.model import EarlyExitModel
from train.module import EarlyExitModule

NUM_TOKENS, GAMMA = 60, 3


def agreeing_model(head: str, context: int) -> EarlyExitModel:
    """Layers above the exit add little, so that drafts are often right; heads are no copies of the base."""
    model = make_model(exits=[ExitConfig(name="draft", layer=3, head=head, context=context)])
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer in model.family.decoder.layers[3:]:
            layer.self_attn.o_proj.weight.mul_(0.3)
            layer.mlp.down_proj.weight.mul_(0.3)
        for name, parameter in model.heads.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(0.3)
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator).to(parameter.device))
        entry = model.heads["draft"].entry
        if context:  # enough to change what is drafted, differently at each place
            entry.context_linear.weight.copy_(0.1 * torch.eye(model.family.hidden_size))
    return model


@pytest.mark.parametrize(
    ("head", "context"), [("native", 0), ("linear", 0), ("layer", 0), ("layer", GAMMA), ("linear_layer", GAMMA)]
)
def test_rounds_and_accepted_drafts_are_the_engines(head, context):
    model = agreeing_model(head, context)
    tiny = Tiny(model, "layerskip", Policy(num_draft_tokens=GAMMA))
    requests = tiny.generate(PROMPTS[:6], SamplingParams(temperature=0, max_tokens=NUM_TOKENS))

    module = EarlyExitModule.__new__(EarlyExitModule)
    torch.nn.Module.__init__(module)
    module.model = model
    for request in requests:
        prompt, answer = list(request.prompt_token_ids), list(request.token_ids)
        (row,) = answered([prompt], [answer], NUM_TOKENS)
        module.figures = Figures(["draft"], {"draft": 0.1, "target": 1.0}, GAMMA)
        with torch.no_grad():
            module.validation_step(collate([row]), 0)
        counted = module.figures.acceptance["draft", "target"]
        (served,) = request.output().metrics.tiers
        accepted = [sum(served.accepted_lengths[j + 1 :]) for j in range(GAMMA)]
        # With a context, what validation lets a layer attend to has the context of one place throughout
        figures, slack = [counted.num_rounds, *counted.accepted], 1 if context else 0
        assert figures == pytest.approx([served.num_drafts, *accepted], abs=slack)
        assert 0.1 < counted.agreement < 0.95, "a test of nothing"
