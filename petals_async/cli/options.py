"""Arguments and options that several commands share, and their defaults.

The defaults of servers are written here as text, since the modules that own them import gRPC; a test compares them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

DEFAULT_REGISTRY = "127.0.0.1:7600"
"""Where `registry` and `up` listen, and the other commands look, unless told otherwise."""


class DtypeName(StrEnum):
    """What servers can compute in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


DEFAULT_LISTEN = "127.0.0.1:0"
DEFAULT_DTYPE = DtypeName.FLOAT32
DEFAULT_DEVICE = "cpu"
DEFAULT_KV_BUDGET = "512MiB"
DEFAULT_DRAIN_S = 5.0

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A directory in Hugging Face format, a Hub id, a .gguf file, or 'demo'.",
        show_default=False,
    ),
]

RegistryAddress = Annotated[
    str,
    typer.Option(
        "--registry", metavar="ADDRESS", help="HOST:PORT of a registry, or static:HOST:PORT,HOST:PORT of block servers."
    ),
]

Dtype = Annotated[DtypeName, typer.Option(help="What to compute in.")]

KvBudget = Annotated[
    str, typer.Option(metavar="SIZE", help="Memory of each server for the KV caches of all sessions, such as 2GiB.")
]

AsJson = Annotated[bool, typer.Option("--json", help="Write JSON to stdout.")]
