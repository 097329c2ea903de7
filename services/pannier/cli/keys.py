"""`pannier keys`: what gateway, workers and clients need to encrypt, and to know one another."""

from pathlib import Path
from typing import Annotated

import typer


def keys(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where they go; what is there already stays.")] = Path(
        "keys"
    ),
    client: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Make a folder for one more client too; may be given again."),
    ] = None,
) -> None:
    """Make the keys of a stack: pairs for the gateway, for its workers and for clients. Shows names of files only.

    Every host needs a part of the folder: the gateway gateway.secret, worker.public and clients/; a worker
    worker.secret, worker.public and gateway.public; a client client.secret and gateway.public.

    Give the folder as --keys to serve, complete, chat and status, as the setting `keys` to each role, and as
    `Client(endpoint, keys=...)` in Python.

    Files that end in .secret have mode 0600 and must keep it. Who has worker.secret can register as a worker, who has a
    client.secret can send requests. To turn a client away, remove clients/NAME.public; the gateway reads the keys as it
    starts.
    """
    from pannier.net.keys import make_keys

    made = make_keys(out, client or ())
    for path in made:
        print(path)
    if not made:
        print(f"{out} has all of them already; nothing was changed")
