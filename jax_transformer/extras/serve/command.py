"""``jax-transformer serve``: a model as an HTTP service with a page."""

import re
from dataclasses import dataclass, field
from typing import Annotated

from jax_transformer.cli.arguments import Command
from jax_transformer.cli.translate import SamplingOptions, SearchOptions
from jax_transformer.config import option
from jax_transformer.config.option import Option
from jax_transformer.errors import ConfigError
from jax_transformer.extras.serve.requests import Limits


@dataclass(frozen=True)
class ServeOptions:
    """Answer translation requests over HTTP, with a page for a browser."""

    run: Annotated[option.Positional[str], Option(group="model")]
    """The model: a run folder, a Hugging Face folder, or hf:owner/name."""
    weights: option.Weights = "auto"
    """Weights of the run: averaged, best, last, a step, or auto (the first that exists)."""
    architecture: option.Architecture | None = None
    """Register an architecture of yours, my_file.py:NAME or package.module:NAME."""
    source_lang: option.SourceLanguage | None = None
    """Source language of a multilingual Hugging Face model: eng_Latn, en_XX, en."""
    target_lang: option.TargetLanguage | None = None
    """Target language of a multilingual Hugging Face model."""
    host: Annotated[str, Option(group="server", metavar="HOST")] = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every IPv4 address of this machine."""
    port: int = 8000
    """Port to listen on; 0 is a free one, which is printed."""
    allowed_hosts: Annotated[tuple[str, ...], Option(metavar="HOST")] = ()
    """Names by which clients may call the server (default: any, or this machine's on loopback)."""
    limits: Annotated[option.Inline[Limits], Option(group="limits")] = field(default_factory=Limits)
    search: Annotated[option.Inline[SearchOptions], Option(group="default decoding options")] = (
        field(default_factory=SearchOptions)
    )
    sampling: Annotated[option.Inline[SamplingOptions], Option(group="default sampling")] = field(
        default_factory=SamplingOptions
    )

    def __post_init__(self) -> None:
        for host in self.allowed_hosts:
            if not re.fullmatch(r"\*|(\*\.)?[\w.-]+|\[[0-9a-fA-F:.]+\]", host):
                raise ConfigError(
                    f"--allowed-hosts {host}: must be a name without a port, *.name, [IPv6] or *"
                )


def run(options: ServeOptions) -> int:
    """Serve until a signal and return the exit code."""
    try:
        from jax_transformer.extras.serve import app
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("starlette", "uvicorn", "prometheus_client"):
            raise
        raise ConfigError(
            f"serve needs the package {package}: pip install 'jax-seq2seq[serve]'"
        ) from None
    from jax_transformer.formats import registry
    from jax_transformer.inference import translation
    from jax_transformer.runtime import process

    bound = app.bind(options.host, options.port)
    process.use_program_cache()
    opened = registry.open(options.run, options.weights)
    translator = translation.load(
        opened,
        source_lang=options.source_lang,
        target_lang=options.target_lang,
        **vars(options.search),
        **vars(options.sampling),
    )
    service = app.Service(
        translator,
        options.limits,
        title=f"{options.run}, step {opened.step}",
        allowed_hosts=options.allowed_hosts or app.hosts(options.host),
    )
    app.serve(service, bound)
    return 0


COMMAND = Command(
    ServeOptions,
    run,
    examples=("serve runs/phrases", "serve opus-mt-en-de --port 8080 --beam 4 --timeout 10"),
)
