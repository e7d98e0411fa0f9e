"""Chat templates in the shape of the families' own, each with a tiny tokenizer that knows its special tokens."""

from typing import NamedTuple

from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from tests.train.conftest import make_tokenizer


class Family(NamedTuple):
    template: str
    bos: str
    eos: str
    specials: tuple[str, ...]
    adds_bos: bool = False  # the tokenizer puts BOS before any text, as Llama's and Gemma's do

    def tokenizer(self) -> PreTrainedTokenizerFast:
        tokenizer = make_tokenizer(self.template)
        tokenizer.add_special_tokens({"bos_token": self.bos, "eos_token": self.eos, "pad_token": self.eos})
        tokenizer.add_special_tokens({"additional_special_tokens": list(self.specials)})
        if self.adds_bos:
            tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
                single=f"{self.bos} $A", special_tokens=[(self.bos, tokenizer.convert_tokens_to_ids(self.bos))]
            )
        return tokenizer


_CHATML_PROMPT = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"

CHATML = Family(
    "{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nYou are an AI<|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    + _CHATML_PROMPT,
    "<|im_start|>",
    "<|im_end|>",
    (),
)

LLAMA3 = Family(
    "{%- for m in messages %}"
    "{%- if loop.first %}{{- bos_token }}{%- endif %}"
    "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}",
    "<|begin_of_text|>",
    "<|eot_id|>",
    ("<|start_header_id|>", "<|end_header_id|>"),
    adds_bos=True,
)

# The thought of a last answer is written, also when it is empty; those of earlier answers are taken out
QWEN3 = Family(
    "{%- for m in messages %}"
    "{%- set ns = namespace(content=m.content, thought='') %}"
    "{%- if m.reasoning_content is string %}{%- set ns.thought = m.reasoning_content %}"
    "{%- elif '</think>' in m.content %}"
    "{%- set ns.thought = m.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{%- set ns.content = m.content.split('</think>')[-1].lstrip('\\n') %}"
    "{%- endif %}"
    "{{- '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.role == 'assistant' and loop.last %}"
    "{{- '<think>\\n' + ns.thought.strip('\\n') + '\\n</think>\\n\\n' + ns.content.lstrip('\\n') }}"
    "{%- else %}{{- ns.content }}{%- endif %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}" + _CHATML_PROMPT,
    "<|endoftext|>",
    "<|im_end|>",
    ("<think>", "</think>"),
)

GEMMA = Family(
    "{{ bos_token }}"
    "{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{%- endif %}"
    "{%- for m in messages %}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{%- endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim }}"
    "{{ '<end_of_turn>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{%- endif %}",
    "<bos>",
    "<end_of_turn>",
    ("<start_of_turn>",),
    adds_bos=True,
)

# What stands before the last question is shortened, so that no earlier answer stands behind the prompt it was given to
REWRITING = Family(
    "{%- set ns = namespace(last=0) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}"
    "{{- '<|im_start|>' + m.role + '\\n' + (m.content[:4] if loop.index0 < ns.last else m.content) + '<|im_end|>\\n' }}"
    "{%- endfor %}" + _CHATML_PROMPT,
    "<|im_start|>",
    "<|im_end|>",
    (),
)

# The prompt opens a thought that no written answer has: what is asked for at serving is never seen in training
OPENS_A_THOUGHT = CHATML._replace(
    template=CHATML.template.replace("<|im_start|>assistant\\n' }}", "<|im_start|>assistant\\n<think>\\n' }}")
)
