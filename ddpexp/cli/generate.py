"""The command `ddpexp generate`: what a trained language model writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from ddpexp.checkpoint.weights import best_text, choose, parse_which
from ddpexp.cli.verb import Call
from ddpexp.config.parse import load
from ddpexp.errors import EXIT_DONE, RefusedError
from ddpexp.run.stored_config import data_facts
from ddpexp.run.stored_run import find_run, read_run
from ddpexp.settings.key import Key
from ddpexp.system import separate_process
from ddpexp.system.terminal import print_message


@dataclass(frozen=True)
class GenerateArguments:
    """What to generate, as typed."""

    prompt: str = ""
    tokens: Annotated[int, Key(at_least=1)] = 200
    temperature: Annotated[float, Key(at_least=0)] = 0.8
    top_k: Annotated[int | None, Key(at_least=1)] = 200
    seed: Annotated[int, Key(at_least=0)] = 0
    checkpoint: str = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"


def generate(call: Call) -> int:
    """Generate in a process of its own, which imports torch; print what is written, and return the exit code.

    Raises:
        RefusedError: no such run, one without text, or an option that means nothing.
    """
    options = call.typed(GenerateArguments())
    source, overrides = call.source()
    run = find_run(source, call.name)
    stored = read_run(run, overrides, f"generate {source}", call.restate)
    tokenizer = _tokenizer(source, stored.manifest)
    typed = f"generate {source} --checkpoint {options.checkpoint}"
    which = parse_which(options.checkpoint, typed)
    checkpoint = choose(run.checkpoints, which, f"generate {source}", typed, _warn)
    if (text := best_text(source, checkpoint, which)) is not None:
        print_message(f"ddpexp: {text}")
    request = {
        "config": stored.text,
        "checkpoint": str(checkpoint.folder.resolve()),
        "tokenizer": tokenizer,
        "options": asdict(options),
    }
    try:
        print(separate_process.call("ddpexp.cli.generate:written", request))
    except separate_process.NoAnswerError as error:
        return error.status
    return EXIT_DONE


def _warn(text: str) -> None:
    print_message(f"ddpexp: warning: {text}")


def written(request: Mapping[str, Any]) -> str:
    """Build the model of a configuration, load its weights, and return what it writes, in a process of its own."""
    import torch

    from ddpexp.checkpoint.format import open_checkpoint
    from ddpexp.data.text.tokenizer import from_record, prompt_of
    from ddpexp.export.trained import saved_model

    checkpoint, options = Path(request["checkpoint"]), GenerateArguments(**request["options"])
    if options.device == "cuda" and not torch.cuda.is_available():
        raise RefusedError("There is no GPU here", place="generate --device cuda", suggestion="Use --device cpu.")
    on_gpu = options.device != "cpu" and torch.cuda.is_available()
    reader = from_record(request["tokenizer"])
    prompt = prompt_of(reader, options.prompt)
    model = saved_model(load(request["config"]), checkpoint, open_checkpoint(checkpoint).has_average)
    if not callable(getattr(model, "generate", None)):
        raise RefusedError(
            f"The model {type(model).__name__} has no method generate(tokens, num_tokens, temperature, top_k, seed), "
            "which the model of recipe=gpt has",
            place=f"generate {checkpoint}",
        )
    model = model.to("cuda" if on_gpu else "cpu")
    begin = torch.tensor([prompt], device="cuda" if on_gpu else "cpu")
    tokens = model.generate(begin, options.tokens, options.temperature, options.top_k, options.seed)[0].tolist()
    return reader.decode(tokens if options.prompt else tokens[len(prompt) :])


def _tokenizer(source: str, manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the record of the tokenizer of a run. Raises: RefusedError, if it has none."""
    tokenizer = data_facts(manifest).get("tokenizer")
    if not isinstance(tokenizer, Mapping):
        raise RefusedError(
            "The model was not trained on data=text, so no tokenizer is stored with it", place=f"generate {source}"
        )
    return tokenizer
