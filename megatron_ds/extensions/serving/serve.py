"""Serve a checkpoint over HTTP at any layout, to try it and to evaluate it with other programs.

  megatron-ds serve --load runs/a
  curl http://127.0.0.1:5000/v1/completions -d '{"prompt": "Once upon a time", "max_tokens": 20}'
  torchrun --nproc-per-node 4 -m megatron_ds serve --load runs/a --tensor-model-parallel-size 2 \\
      --pipeline-model-parallel-size 2

Endpoints: OpenAI's /v1/completions, /v1/chat/completions and /v1/models, Megatron's PUT /api, /health, and a page
for browsers at /. --load takes the folder of a run (its --save), or of another program's checkpoint. All flags of a
layout are those of training, without any the layers are divided over all processes (--tensor-model-parallel-size);
the model and the tokenizer are the checkpoint's. There is no authentication: keep the
server on this machine, or behind a proxy that has some.
"""

import argparse
import logging
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from megatron_ds.checkpoint.place import place_of
from megatron_ds.cli import Arguments, StopRequest
from megatron_ds.console import set_up_logging
from megatron_ds.errors import ConfigError
from megatron_ds.extensions.chat.template import ChatTemplate, find_template
from megatron_ds.extensions.evaluation.checkpoint_model import (
    LoadedModel,
    check_flags,
    evaluation_config,
    load_model,
    own_flags,
)
from megatron_ds.extensions.generation.generator import Generator
from megatron_ds.extensions.generation.saved_flags import saved_flags
from megatron_ds.extensions.serving.generation_loop import GenerationLoop
from megatron_ds.extensions.serving.served_model import ServedModel
from megatron_ds.host.packages import missing_package
from megatron_ds.mpu import launch as launching
from megatron_ds.mpu.agree import on_one_rank
from megatron_ds.training.distributed import joined

PORT = 5000  # Megatron's
LAST_ANSWER_SECONDS = 10  # for a client that reads the end of its answer slowly
logger = logging.getLogger(__name__)


def run_tool(argv: Sequence[str] | None = None) -> int:
    """Serve on rank 0 until a signal; the other ranks compute with it."""
    with launching.reported_to_others():
        args, rest = own_flags(_parser(), argv)
        check_flags(rest)
        check(args)
        make_service = service_class()
        launch = launching.read_launch(os.environ)
        level = logging.WARNING if launch.rank else logging.INFO
        set_up_logging(level, stream=sys.stderr)
        flags = saved_flags(args.load, args.iteration, rest, launch.world_size)
        config = evaluation_config(flags, launch)
        check_length(args.max_length, config.model.positions)
        # An address that is taken is an error before the model is loaded.
        address = args.host, args.port, args.cors_origin
        service = None if launch.rank else make_service(*address)
    try:
        with joined(config, launch) as mesh:
            model = load_model(config, mesh, args.iteration)
            template = on_one_rank(
                mesh.group("world"), lambda: template_of(model, args.chat_template)
            )
            generator = Generator(
                model.replica, requests=args.batch_size, length=args.max_length
            )
            with StopRequest() as stop:
                stop.defer()
                if service is None:
                    generator.follow()
                else:
                    served = served_model(args, model, generator, template)
                    serve(service, served, generator, args.max_requests, stop)
    finally:
        if service is not None:
            service.close()
    return 0


def _parser() -> Arguments:
    parser = Arguments(__doc__)
    add = parser.add_argument
    add("--load", type=place_of, required=True, help="folder of a checkpoint")
    add("--iteration", type=int, help="step of the checkpoint (default: the latest)")
    # Flags of the address and the name.
    add(
        "--host",
        default="127.0.0.1",
        help="address to listen at (default 127.0.0.1: this machine alone; 0.0.0.0: all networks)",
    )
    add(
        "--port",
        type=int,
        default=PORT,
        help=f"port to listen at; 0: any free one, which is printed (default {PORT})",
    )
    add(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="a site whose pages may use this server from a browser, such as http://localhost:3000; * for all. May be "
        "given several times (default: none but the server's own page)",
    )
    add(
        "--served-name",
        metavar="NAME",
        help="name of the model in requests (default: name of the --load folder)",
    )
    # Flags that bound what it takes at a time.
    add(
        "--batch-size",
        type=int,
        default=16,
        metavar="N",
        help="texts that are generated at once on each data-parallel rank; others wait (default 16)",
    )
    add(
        "--max-length",
        type=int,
        metavar="N",
        help="tokens of a text, prompt included; memory for --batch-size texts of this length is kept "
        "(default: as many as the model has positions)",
    )
    add(
        "--max-requests",
        type=int,
        default=256,
        metavar="N",
        help="texts that are generated or wait; more are refused with status 429 (default 256)",
    )
    add(
        "--chat-template",
        metavar="FILE",
        help="the template of conversations (default: the tokenizer's)",
    )
    return parser


def service_class() -> Any:
    """Return the class `HttpService`. Raises ConfigError without the packages that it needs."""
    try:
        from megatron_ds.extensions.serving.http_service import HttpService
    except ImportError as error:
        package, *_ = (error.name or "starlette").split(".")
        raise missing_package("megatron-ds serve", package, "serve", error) from None
    return HttpService


def check(args: argparse.Namespace) -> None:
    """Raises ConfigError for numbers that cannot work."""
    if not 0 <= args.port < 1 << 16:
        raise ConfigError(
            f"--port {args.port}: a port is 0 to 65535. Use 0 for any free one."
        )
    for name in ("batch_size", "max_requests", "max_length"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: use 1 or more.")


def check_length(length: int | None, positions: int) -> None:
    """Raises ConfigError for texts that are longer than the model has positions."""
    if length is not None and length > positions:
        raise ConfigError(
            f"--max-length {length}: the model has {positions} positions. Use at most as many, or leave it out for all."
        )


def template_of(model: LoadedModel, path: str | None) -> ChatTemplate | None:
    """Return the chat template of a file, else of the tokenizer; None without one. Raises DataError if it is
    no template.
    """
    tokenizer = model.replica.config.data.tokenizer_model
    if path is None and tokenizer is None:
        return None
    found = find_template(tokenizer or ".", path, {})
    if found is not None:
        found.check()
    return found


def served_model(
    args: argparse.Namespace,
    model: LoadedModel,
    generator: Generator,
    template: ChatTemplate | None,
) -> ServedModel:
    """Return what endpoints know of the model."""
    config = model.replica.config
    assert config.model.vocab_size is not None  # that of the tokenizer
    return ServedModel(
        args.served_name or args.load.resolve().name,
        model.tokenizer,
        generator.max_length,
        config.model.vocab_size,
        generator.check,
        template,
        int(time.time()),
        model.ends,
        args.max_requests,
    )


def serve(
    service: Any,
    model: ServedModel,
    generator: Generator,
    most: int,
    stop: StopRequest,
) -> None:
    """Answer requests until a signal; those under way are answered first. The other ranks follow."""
    # The first rendering imports for seconds, and the first look at all tokens takes one.
    _ = model.answer_ends, model.longest_text
    loop = GenerationLoop(generator, most, lambda: stop.received is not None)
    service.start(model, loop)
    print(f"serving {model.name} at {service.url}", flush=True)
    try:
        loop.run()
        generator.close()
    finally:
        service.finish(LAST_ANSWER_SECONDS)
    logger.info("stopped by %s", stop.received)
