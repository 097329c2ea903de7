"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_PORT = 5151
DEFAULT_ENDPOINT = f"tcp://127.0.0.1:{DEFAULT_PORT}"

Endpoint = Annotated[
    str, typer.Option(envvar="PANNIER_ENDPOINT", help="Where the gateway listens for clients.", show_default=True)
]
Insecure = Annotated[bool, typer.Option(help="Allow addresses on other hosts, in the clear.")]
Keys = Annotated[
    Path | None,
    typer.Option(envvar="PANNIER_KEYS", metavar="FOLDER", help="Keys that pannier keys has made; encrypts."),
]
MaxTokens = Annotated[int | None, typer.Option(help="Most tokens to generate; as many as fit when not given.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Draw from the fewest tokens that together reach this probability.")]
TopK = Annotated[int, typer.Option(help="Draw from so many of the most likely tokens; 0 is all.")]
MinP = Annotated[float, typer.Option(help="Draw from tokens with at least this share of the best one's probability.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1: tokens that occurred become less likely.")]
Stop = Annotated[list[str] | None, typer.Option(help="End before this text; may be given again.")]
Seed = Annotated[int | None, typer.Option(help="Makes the draw repeatable.")]
Model = Annotated[str | None, typer.Option(help="The name that the stack serves the model under, to be sure.")]
