"""Messages to tokens: verbatim sampled tokens, suffix-only tokenisation, templates of several families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.files import InputError
from train.chat import KEPT_PROMPTS, ChatCodec

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# In the manner of Qwen3: tools in the system turn, tool results as user turns, reasoning of earlier turns dropped.
QWEN3_LIKE = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- set last = namespace(user=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}<|im_start|>user
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{% if '</think>' in m.content and loop.index0 < last.user %}{{ m.content.split('</think>')[-1].lstrip('\\n') }}
{%- else %}{{ m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A byte-level BPE without merges and with ChatML's special tokens, built in memory."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, special=True) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def codec_with(tokenizer: Any, template: str, **template_kwargs: Any) -> ChatCodec:
    tokenizer.chat_template = template
    return ChatCodec(tokenizer, [tokenizer.convert_tokens_to_ids("<|im_end|>")], template_kwargs)


CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Where is order 17? Ünïcode ✓"},
]
LATER = [
    ("<tool>look</tool>", [{"role": "tool", "content": '{"status": "sent"}'}]),
    ("It was sent.", [{"role": "user", "content": "Thanks!\n"}]),
    ("", [{"role": "tool", "content": "a"}, {"role": "user", "content": "b"}]),
]


@pytest.mark.parametrize("template", [CHATML, QWEN3_LIKE], ids=["chatml", "qwen3"])
def test_suffixes_add_up_to_the_whole_template(tokenizer: Any, template: str) -> None:
    """For canonical text the stream built turn by turn equals tokenising the whole conversation at once."""
    codec = codec_with(tokenizer, template)
    messages = list(CONVERSATION)
    stream = codec.prompt_ids(messages)
    for said, new in LATER:
        stream += [*codec._encode(said), codec.end_of_turn, *codec.suffix_ids(new)]
        messages += [{"role": "assistant", "content": said}, *new]
        assert stream == codec.prompt_ids(messages)


def test_suffixes_add_up_for_the_real_model(smollm2: Path) -> None:
    codec = ChatCodec.from_model(str(smollm2))
    messages = list(CONVERSATION)
    stream = codec.prompt_ids(messages)
    for said, new in LATER:
        stream += [*codec._encode(said), codec.end_of_turn, *codec.suffix_ids(new)]
        messages += [{"role": "assistant", "content": said}, *new]
        assert stream == codec.prompt_ids(messages)


def test_stop_token_is_the_configs_and_not_the_tokenizers(smollm2: Path) -> None:
    """This checkpoint once came with a tokenizer whose eos was <|im_start|>; the model stops on <|im_end|>."""
    codec = ChatCodec.from_model(str(smollm2))
    assert codec.stop_token_ids == (2,) and codec.end_of_turn == 2


def test_cut_turn_is_closed_as_context(tokenizer: Any) -> None:
    codec = codec_with(tokenizer, CHATML)
    new = [{"role": "user", "content": "go on"}]
    assert codec.suffix_ids(new, turn_closed=False) == [codec.end_of_turn, *codec.suffix_ids(new)]


def test_earlier_reasoning_cannot_be_rewritten(tokenizer: Any) -> None:
    """A template that drops old reasoning cannot change our stream: only the suffix is rendered."""
    codec = codec_with(tokenizer, QWEN3_LIKE)
    assert codec.rewrites_history
    assert not codec_with(tokenizer, CHATML).rewrites_history
    new = [{"role": "user", "content": "and now?"}]
    codec = codec_with(tokenizer, QWEN3_LIKE)
    said = "<think>\nhard\n</think>\n\nyes"
    stream = [*codec.prompt_ids(CONVERSATION), *codec._encode(said), codec.end_of_turn, *codec.suffix_ids(new)]
    assert "hard" in tokenizer.decode(stream)
    retold = [*CONVERSATION, {"role": "assistant", "content": said}, *new]
    assert "hard" not in tokenizer.decode(codec.prompt_ids(retold)), "the template under test does rewrite"


def test_tools_and_template_options_reach_the_template(tokenizer: Any) -> None:
    codec = codec_with(tokenizer, QWEN3_LIKE, enable_thinking=False)
    text = tokenizer.decode(codec.prompt_ids(CONVERSATION, TOOLS))
    assert '"name": "look"' in text and text.endswith("<think>\n\n</think>\n\n")
    assert "<think>" not in tokenizer.decode(codec_with(tokenizer, QWEN3_LIKE).prompt_ids(CONVERSATION))


def test_a_groups_prompt_is_rendered_once(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = codec_with(tokenizer, CHATML)
    rendered: list[Any] = []
    render = codec._render
    monkeypatch.setattr(codec, "_render", lambda *a, **k: rendered.append(a) or render(*a, **k))
    messages = [{"role": "user", "content": "hi"}]
    first = codec.prompt_ids(messages)
    first.append(-1)  # an episode goes on from its own list
    assert codec.prompt_ids([dict(m) for m in messages]) == first[:-1] and len(rendered) == 1
    messages[0]["content"] = "ho"
    assert codec.prompt_ids(messages) != first[:-1] and len(rendered) == 2
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
    codec.prompt_ids(messages, tools)
    assert len(rendered) == 3
    for i in range(KEPT_PROMPTS):
        codec.prompt_ids([{"role": "user", "content": str(i)}])
    assert len(codec._prompts) == KEPT_PROMPTS
    assert codec.prompt_ids([{"role": "user", "content": "hi"}]) == first[:-1] and len(rendered) == 4 + KEPT_PROMPTS


def test_decode_drops_only_the_end_of_the_turn(tokenizer: Any) -> None:
    codec = codec_with(tokenizer, CHATML)
    ids = codec._encode("a<|im_start|>b")
    assert codec.decode([*ids, codec.end_of_turn]) == "a<|im_start|>b"
    assert codec.decode([]) == codec.decode([codec.end_of_turn]) == ""


def test_bytes_of_a_cut_character_survive(tokenizer: Any) -> None:
    codec = codec_with(tokenizer, CHATML)
    ids = codec._encode("✓")
    assert len(ids) == 3
    assert "✓" not in codec.decode(ids[:2])  # shown as a replacement character; the ids stay what they are


def test_template_that_ends_turns_otherwise_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = CHATML
    with pytest.raises(InputError, match=r"ends a turn with '<\|im_end\|>'.*eos_token_id"):
        ChatCodec(tokenizer, [tokenizer.convert_tokens_to_ids("<|endoftext|>")])


def test_missing_template_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="no chat template"):
        ChatCodec(tokenizer, [2])


def test_template_that_hides_assistant_turns_is_refused(tokenizer: Any) -> None:
    hidden = CHATML.replace("{{ m.content }}", "{% if m.role != 'assistant' %}{{ m.content }}{% endif %}")
    with pytest.raises(InputError, match="does not print the content of assistant turns"):
        codec_with(tokenizer, hidden)


def test_missing_model_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="check --model"):
        ChatCodec.from_model(str(tmp_path))
