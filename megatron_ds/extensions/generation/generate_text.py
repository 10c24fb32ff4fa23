"""Continue texts with a trained model, from a checkpoint of any layout, or chat with it.

  megatron-ds generate --load quickstart/checkpoints --prompt "If the file" --max-new-tokens 60
  megatron-ds generate --load runs/chats --chat
  torchrun --nproc-per-node 4 -m megatron_ds generate --load … --prompts-file prompts.jsonl --json \\
      --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2

--load takes the folder of a run (its --save), or of another program's checkpoint. All flags of a layout and of
memory are those of training, without any the layers are divided over all processes (--tensor-model-parallel-size);
the model and the tokenizer are the checkpoint's.
"""

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from megatron_ds.checkpoint.place import place_of
from megatron_ds.cli import Arguments
from megatron_ds.console import escape_unknown, set_up_logging
from megatron_ds.errors import ConfigError, DataError
from megatron_ds.extensions.chat.template import TemplateRefusal, load_template
from megatron_ds.extensions.corpora.text_files import read_blocks, texts_of
from megatron_ds.extensions.evaluation.checkpoint_model import (
    LoadedModel,
    check_flags,
    evaluation_config,
    load_model,
    own_flags,
)
from megatron_ds.extensions.generation.chat_turns import ChatTurns
from megatron_ds.extensions.generation.continuation import (
    Continuation,
    TextGenerator,
    TextRequest,
)
from megatron_ds.extensions.generation.generator import Generator
from megatron_ds.extensions.generation.model_text import text_ids
from megatron_ds.extensions.generation.requests import (
    GeneratedToken,
    GenerationRequest,
    Sampling,
)
from megatron_ds.extensions.generation.saved_flags import saved_flags
from megatron_ds.extensions.generation.typed_lines import typed_lines
from megatron_ds.host.regular_file import read_text
from megatron_ds.mpu import launch as launching
from megatron_ds.mpu.agree import on_one_rank
from megatron_ds.training.distributed import joined

PROMPT_KEYS = ["prompt"]  # of a line of JSON
LIMITS = {
    "--max-new-tokens": (int, 64, "generate at most this many tokens"),
    "--min-new-tokens": (int, 0, "generate at least this many tokens"),
    "--temperature": (float, 1.0, "divides the logits; 0 is greedy"),
    "--top-k": (int, 0, "sample from the k most likely tokens only; 0: no limit"),
    "--top-p": (float, 1.0, "sample from the most likely tokens with this probability"),
    "--min-p": (float, 0.0, "least share of the most likely token's probability"),
    "--repetition-penalty": (float, 1.0, "above 1: tokens of the text are less likely"),
    "--seed": (
        int,
        0,
        "the same seed gives the same texts at every layout; each prompt adds its number, from 0 up",
    ),
    "--requests": (int, 16, "texts at once on each data-parallel rank"),
}


def parse_arguments(
    argv: Sequence[str] | None = None,
) -> tuple[argparse.Namespace, list[str]]:
    """(the flags of the command, those of the run). Raises ConfigError."""
    parser = Arguments(__doc__)
    add = parser.add_argument
    # Flags that choose the checkpoint and the prompts.
    add("--load", type=place_of, required=True, help="folder of a checkpoint")
    add("--iteration", type=int, help="step of the checkpoint (default: the latest)")
    add(
        "--prompt",
        action="append",
        default=[],
        help="text to continue; may be given several times",
    )
    add(
        "--prompts-file",
        type=Path,
        metavar="FILE",
        help='a prompt on each line; of a .jsonl file the text under "prompt"',
    )
    add("--chat", action="store_true", help="answer what is typed, line by line")
    add("--system", metavar="TEXT", help="system message of --chat")
    add(
        "--chat-template",
        metavar="FILE",
        help="Jinja template of --chat; default: that of the tokenizer",
    )
    # Flags that choose the tokens and the end of a text.
    for flag, (kind, default, meaning) in LIMITS.items():
        add(flag, type=kind, default=default, help=f"{meaning} (default {default})")
    add("--greedy", action="store_true", help="the same as --temperature 0")
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; may be given several times",
    )
    add(
        "--ignore-eod",
        action="store_true",
        help="continue after the end-of-document token",
    )
    add("--json", action="store_true", help="print a line of JSON for each prompt")
    add(
        "--logprobs",
        type=int,
        metavar="N",
        help="with --json: log-probability of each token, and the N most likely ones",
    )
    add(
        "--prompt-logprobs",
        action="store_true",
        help="with --logprobs: those of the prompt's tokens, too",
    )
    return own_flags(parser, argv)


def run_tool(argv: Sequence[str] | None = None) -> int:
    """Load the model, and print the text that continues each prompt."""
    with launching.reported_to_others():
        args, rest = parse_arguments(argv)
        check_flags(rest)
        check(args, rest)
        launch = launching.read_launch(os.environ)
        set_up_logging(logging.WARNING, stream=sys.stderr)
        escape_unknown(sys.stdout)
        flags = saved_flags(args.load, args.iteration, rest, launch.world_size)
        config = evaluation_config(flags, launch)
    with joined(config, launch) as mesh:
        model = load_model(config, mesh, args.iteration)
        generator = Generator(model.replica, requests=args.requests)
        world = mesh.group("world")

        def lead() -> None:
            try:
                (chat if args.chat else show)(args, model, generator)
            finally:
                generator.close()

        generator.follow()
        on_one_rank(world, lead)
    return 0


def check(args: argparse.Namespace, rest: Sequence[str]) -> None:
    """Raises ConfigError for flags that contradict each other, before anything is loaded."""
    check_numbers(args)
    # One kind of prompts, and the flags of that kind.
    given = [bool(args.prompt), args.prompts_file is not None, args.chat]
    if sum(given) != 1:
        raise ConfigError(
            f"{sum(given)} of --prompt, --prompts-file and --chat are given. Use one of them."
        )
    for name in ("system", "chat_template"):
        if getattr(args, name) is not None and not args.chat:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} is about a --chat. Add it, or remove {flag}.")
    # What is printed, and how it is computed.
    if args.logprobs is not None and not args.json:
        raise ConfigError("--logprobs is printed with --json. Add it.")
    if args.prompt_logprobs and args.logprobs is None:
        raise ConfigError("--prompt-logprobs needs --logprobs N. Use 0 or more.")
    if args.chat and args.json:
        raise ConfigError("--json prints no chat. Use --prompt or --prompts-file.")
    if "--context-parallel-size" in rest:
        size = rest[rest.index("--context-parallel-size") + 1 :][:1]
        if size != ["1"]:
            raise ConfigError(
                f"--context-parallel-size {''.join(size)}: each rank keeps the keys of whole texts. Use 1; "
                "checkpoints of every size load."
            )
    for text in (*args.prompt, *args.stop, args.system or ""):
        check_text(text)


def check_numbers(args: argparse.Namespace) -> None:
    """Raises ConfigError for numbers that no text can have."""
    if args.max_new_tokens < 1:
        raise ConfigError(
            f"--max-new-tokens {args.max_new_tokens} generates no text. Use a positive number."
        )
    if not 0 <= args.min_new_tokens <= args.max_new_tokens:
        raise ConfigError(
            f"--min-new-tokens {args.min_new_tokens} is not between 0 and --max-new-tokens {args.max_new_tokens}. "
            "Lower it, or raise --max-new-tokens."
        )
    if (args.logprobs or 0) < 0:
        raise ConfigError(f"--logprobs {args.logprobs}: use 0 or more.")
    sampling_of(args)


def check_text(text: str) -> None:
    """Raises ConfigError for the text of a flag that is not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{text!r} is not UTF-8 at character {error.start}. Give it in UTF-8, or prompts in a --prompts-file."
        ) from None


def sampling_of(args: argparse.Namespace, number: int = 0) -> Sampling:
    """Return how the tokens of a prompt are chosen. number: of the prompt, so that prompts are independent samples.
    Raises ConfigError for impossible values."""
    return Sampling(
        0.0 if args.greedy else args.temperature,
        args.top_k,
        args.top_p,
        args.min_p,
        args.repetition_penalty,
        args.seed + number,
    )


def request_of(
    args: argparse.Namespace,
    tokens: Sequence[int],
    stop_tokens: frozenset[int],
    max_length: int,
    number: int,
) -> GenerationRequest:
    """Return a request by the flags, up to the last position of the model. number: of the prompt, from 0 up. Raises
    ConfigError without room."""
    room = max(max_length - len(tokens), 0)
    least = max(args.min_new_tokens, 1)
    if room < least:
        raise ConfigError(
            f"the prompt, or the conversation so far, of {len(tokens)} tokens leaves {room} of {max_length} positions "
            f"for new ones, and at least {least} are asked for. Shorten the prompt, lower --min-new-tokens, or begin "
            "another conversation."
        )
    most = min(args.max_new_tokens, room)
    return GenerationRequest(
        tuple(tokens),
        sampling_of(args, number),
        most,
        args.min_new_tokens,
        stop_tokens,
        args.logprobs,
        args.prompt_logprobs,
    )


def show(args: argparse.Namespace, model: LoadedModel, generator: Generator) -> None:
    """Print the text of each prompt, in their order, as soon as it is complete."""
    tokenizer = model.tokenizer
    prompts = args.prompt or read_prompts(args.prompts_file)
    ends = frozenset() if args.ignore_eod else model.ends
    requests = []
    for number, prompt in enumerate(prompts):
        try:
            tokens = text_ids(tokenizer, prompt)
            request = request_of(args, tokens, ends, generator.max_length, number)
            generator.check(request)
        except (ConfigError, DataError) as error:
            text = f"prompt {number + 1} of {len(prompts)}: {error}"
            raise type(error)(text) from None
        requests.append(TextRequest(request, tuple(args.stop)))
    # Texts end in any order.
    found = [Continuation() for _ in prompts]
    printed = 0
    for _ in TextGenerator(generator, tokenizer).stream(requests, found):
        while printed < len(found) and found[printed].finish is not None:
            print_text(args, prompts[printed], found[printed], len(found) > 1)
            printed += 1


def print_text(
    args: argparse.Namespace,
    prompt: str,
    found: Continuation,
    is_one_of_many: bool,
) -> None:
    """Print a complete text, or its JSON."""
    if not args.json:
        print(prompt + found.text, flush=True)
        if is_one_of_many:
            print("-" * 80, flush=True)
        return
    record: dict[str, Any] = {
        "prompt": prompt,
        "text": found.text,
        "finish": found.finish,
        "tokens": [token.token for token in found.tokens],
    }
    if args.logprobs is not None:
        record["logprobs"] = list(map(scores_of, found.tokens))
    if args.prompt_logprobs:
        record["prompt_tokens"] = [score.token for score in found.prompt_scores]
        record["prompt_logprobs"] = list(map(scores_of, found.prompt_scores))
    print(json.dumps(record, ensure_ascii=False), flush=True)


def scores_of(token: GeneratedToken) -> dict:
    """Return the log-probability of a token, and of the most likely ones in its place."""
    return {"logprob": token.log_prob, "likeliest": list(token.alternatives)}


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a file, in its lines that are not blank. Raises DataError."""
    found = _json_prompts(path) if path.suffix == ".jsonl" else _plain_prompts(path)
    if not found:
        raise DataError(
            f"--prompts-file {path} has no prompts. Write one on each line."
        )
    return found


def _json_prompts(path: Path) -> list[str]:
    """Return the texts under "prompt". Raises DataError with the number of a line that has none."""
    prompts: list[str] = []
    for block in read_blocks(str(path), keys=PROMPT_KEYS):
        columns, bad = texts_of(block, PROMPT_KEYS)
        if bad:
            raise DataError(
                f'--prompts-file {bad[0]}. Write {{"prompt": "…"}} on each line.'
            )
        prompts += cast("list[str]", columns[0])  # not split into sentences
    return prompts


def _plain_prompts(path: Path) -> list[str]:
    """Return the lines, which end with a line feed alone: other separators may be part of a prompt. Raises
    DataError.
    """
    try:
        text = read_text(
            path, DataError, f"--prompts-file {path}", encoding="utf-8-sig"
        )
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"--prompts-file {path} cannot be read: {error}. Use UTF-8 text with a prompt on each line."
        ) from None
    return list(filter(str.strip, text.split("\n")))


def chat(args: argparse.Namespace, model: LoadedModel, generator: Generator) -> None:
    """Answer each line of standard input, until its end. Earlier lines and answers are part of the prompt."""
    path = model.replica.config.data.tokenizer_model
    if path is None:
        raise ConfigError(
            "--chat needs the chat template of a tokenizer with files, and this model has none. Use --prompt."
        )
    turns = ChatTurns(
        load_template(path, args.chat_template, {}),
        model.tokenizer,
        model.ends,
    )
    # The conversation grows by each line and its answer.
    texts = TextGenerator(generator, model.tokenizer)
    messages = []
    if args.system:
        messages.append({"role": "system", "content": args.system})
    # While no line is typed, the other ranks see that rank 0 is alive.
    lines = typed_lines(sys.stdin.fileno(), ask, generator.step)
    for number, line in enumerate(lines):
        messages.append({"role": "user", "content": line})
        try:
            tokens = turns.prompt(messages)
        except TemplateRefusal as error:
            raise DataError(
                f"the chat template refuses the messages: {error}."
            ) from None
        # The answer appears while it is generated.
        request = request_of(
            args, tokens, turns.stop_tokens, generator.max_length, number
        )
        asked = TextRequest(request, (*turns.stops, *args.stop))
        answer = Continuation()
        for _, text in texts.stream([asked], [answer]):
            print(text, end="", flush=True)
        print(flush=True)
        messages.append({"role": "assistant", "content": answer.text})


def ask() -> None:
    """Print what invites a person to type."""
    if sys.stdin.isatty():
        print("> ", end="", flush=True)
