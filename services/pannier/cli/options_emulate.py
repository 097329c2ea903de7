"""Options that make devices and links slower than they are, to try what isn't there. What is emulated says so."""

from typing import Annotated

import typer

EmulateCompute = Annotated[
    str | None,
    typer.Option(
        metavar="MS[,US]",
        help="Compute workers compute nothing, and wait so long for each step (and row): no answer means anything.",
    ),
]
EmulateAttention = Annotated[
    str | None,
    typer.Option(metavar="MS[,US]", help="Attention of each step (and row) waits until it has taken so long."),
]
EmulateRate = Annotated[
    str | None,
    typer.Option(metavar="FACTOR[,...]", help="Attention workers are so fast beside what they are: 0.5 is half."),
]
EmulateDelay = Annotated[float | None, typer.Option(metavar="MS", help="Links take so much longer each way.")]
EmulateBandwidth = Annotated[float | None, typer.Option(metavar="GBIT", help="Links carry so many Gbit/s each way.")]
