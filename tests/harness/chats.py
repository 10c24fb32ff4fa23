"""Small chat templates of the kinds that models have, a tokenizer for them, and random conversations.

The words of a message begin and end with marks of its role, so that a text shows whose words are where.
"""

import json
import random
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from megatron_ds.extensions.chat.conversation import Conversation, conversation_of

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
PROMPT = "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
# Marks what the assistant writes, and its end.
MARKED = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{%- if m.role == 'assistant' %}"
    "{%- generation %}{{ m.content + '<|im_end|>' }}{%- endgeneration %}"
    "{%- else %}{{ m.content + '<|im_end|>' }}{%- endif %}{{ '\n' }}{%- endfor %}"
    + PROMPT
)
ENDS_UNMARKED = MARKED.replace(
    "{{ m.content + '<|im_end|>' }}{%- endgeneration %}",
    "{{ m.content }}{%- endgeneration %}{{ '<|im_end|>' }}",
)
# Marks what the user writes: its author confused the roles.
MISMARKED = MARKED.replace("== 'assistant'", "!= 'assistant'")
# Contents are trimmed, and the system message is part of the first question.
TRIMMED = (
    "{%- set ns = namespace(system='') %}{%- for m in messages %}"
    "{%- if m.role == 'system' %}{%- set ns.system = m.content + '\n\n' %}"
    "{%- else %}{{ '[' + m.role + '] ' + ns.system + m.content | trim + ' [end]\n' }}"
    "{%- set ns.system = '' %}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '[assistant] ' }}{%- endif %}"
)
# Reasoning and calls; thoughts before the last question are dropped, as in several reasoning models.
THINKING = (
    "{%- set ns = namespace(last=0) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{%- endif %}"
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' and loop.index0 > ns.last %}"
    "{{ '<think>\n' + (m.reasoning_content or '') | trim + '\n</think>\n\n' }}{%- endif %}"
    "{{ m.content | trim }}"
    "{%- for call in m.tool_calls or [] %}"
    "{{ '\n<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}{%- endfor %}"
    "{{ '<|im_end|>\n' }}{%- endfor %}" + PROMPT
)
# The result of a tool belongs to the call before it, and there is none without a call.
RESULTS_OF_CALLS = THINKING.replace(
    "{{ '<|im_start|>' + m.role",
    "{%- if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
    "{{ raise_exception('a result without a call') }}{%- endif %}"
    "{{ '<|im_start|>' + m.role",
    1,
)
# Results are inside of the turn that called, which ends after the next answer, and opens a result in any case.
RESULTS_INSIDE = (
    "{%- for m in messages %}{%- if m.role != 'tool' %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{%- for call in m.tool_calls or [] %}{{ '<call>' + call.function | tojson + '</call>' }}{%- endfor %}"
    "{%- if m.tool_calls %}{{ '<result>' }}{%- if not loop.last %}"
    "{{ messages[loop.index].content + '</result>' }}{%- endif %}"
    "{%- else %}{{ '<|im_end|>\n' }}{%- endif %}{%- endif %}{%- endfor %}" + PROMPT
)
# Ends of turns are no special tokens, and the next turn begins with one, as in GLM.
ENDLESS = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{%- endfor %}"
    + PROMPT
)
TEMPLATES = {
    "chatml": CHATML,
    "marked": MARKED,
    "mismarked": MISMARKED,
    "trimmed": TRIMMED,
    "thinking": THINKING,
    "results_of_calls": RESULTS_OF_CALLS,
    "results_inside": RESULTS_INSIDE,
}
LETTERS = 'abcdef ghijk\n<{"éあ'
LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
    },
}


def write_tokenizer(folder: Path, template: str | None = CHATML) -> Path:
    """A tokenizer of bytes with a few special tokens, in the files of Hugging Face."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|endoftext|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def random_record(draw: random.Random, kinds: frozenset[str]) -> dict:
    """A conversation in OpenAI's form.  kinds: of "system", "tools", "thinking", "turns"."""
    messages: list[dict] = []

    def words(mark: str) -> str:
        name = f"{mark}{len(messages)}"
        letters = draw.choices(LETTERS, k=draw.randint(1, 30))
        return name + "".join(letters) + name

    def thoughtful(message: dict) -> dict:
        if "thinking" in kinds and draw.random() < 0.7:
            message["reasoning_content"] = words("THOUGHT")
        return message

    if "system" in kinds:
        messages.append({"role": "system", "content": words("SYSTEM")})
    for _ in range(draw.randint(1, 4) if "turns" in kinds else 1):
        messages.append({"role": "user", "content": words("USER")})
        if "tools" in kinds and draw.random() < 0.7:
            function = {"name": "lookup", "arguments": {"q": words("ARGUMENT")}}
            call = {"type": "function", "id": "abcdefghi", "function": function}
            content = draw.choice(["", words("ANSWER")])
            said = {"role": "assistant", "content": content, "tool_calls": [call]}
            messages.append(thoughtful(said))
            messages.append(
                {
                    "role": "tool",
                    "name": "lookup",
                    "tool_call_id": "abcdefghi",
                    "content": words("RESULT"),
                }
            )
        said = {"role": "assistant", "content": words("ANSWER")}
        messages.append(thoughtful(said))
    return {"messages": messages} | ({"tools": [LOOKUP]} if "tools" in kinds else {})


def random_conversation(seed: int) -> Conversation:
    """A random conversation of a random kind."""
    draw = random.Random(seed)
    options = ("system", "tools", "thinking", "turns")
    kinds = frozenset(kind for kind in options if draw.random() < 0.5)
    return conversation_of(random_record(draw, kinds))
